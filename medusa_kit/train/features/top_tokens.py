"""The base's likeliest next tokens at hidden states.

Shapes: P positions, D hidden, S likeliest tokens of the base.
"""

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel

LOGIT_ROWS = 1024  # rows of the base's logits that exist at once


def top_tokens(base: BaseModel, hidden_PD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids_PS int32, probabilities_PS float32) of the base's likeliest next tokens."""
    ids_PS = torch.empty(len(hidden_PD), count, dtype=torch.int32, device=hidden_PD.device)
    chances_PS = torch.empty(len(hidden_PD), count, dtype=torch.float32, device=hidden_PD.device)
    for start in range(0, len(hidden_PD) if count else 0, LOGIT_ROWS):
        rows = slice(start, start + LOGIT_ROWS)
        top = base.head_logits(hidden_PD[rows]).float().softmax(-1).topk(count)
        ids_PS[rows], chances_PS[rows] = top.indices.int(), top.values
    return ids_PS, chances_PS
