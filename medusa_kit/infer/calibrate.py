"""Calibration: at which rank did each head have the true token, over answers the model wrote.

One teacher-forced forward an answer; every position from the last prompt token on counts.

Shapes: B batch, T tokens, D hidden, K heads, J = K + 1 tokens ahead, P positions.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base_model import BaseModel
from medusa_kit.data.readers import AnswerRow
from medusa_kit.errors import DataError
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.ranks import UNAVAILABLE, token_ranks
from medusa_kit.tree.statistics import RankStatistics

NUM_RANKS = 32  # ranks looked at; the best tree of 64 nodes uses some 20 at depth 1
BATCH_TOKENS = 4096


def calibrate(
    base: BaseModel, heads: MedusaHeads, answers: Sequence[AnswerRow], num_ranks: int = NUM_RANKS
) -> RankStatistics:
    """Rank statistics of `heads` over answers; empty answers and too long ones are left out.

    Raises DataError when no answer remains.
    """
    context = base.info.context_length
    usable = [a for a in answers if a.response_ids
              and len(a.prompt_ids) + len(a.response_ids) <= context]  # fmt: skip
    if not usable:
        raise DataError(
            f"none of the {len(answers)} answers can be calibrated on",
            hint="answers need response_ids and have to fit the model's context",
        )
    order = sorted(range(len(usable)), key=lambda i: _size(usable[i]))
    ranks: list[np.ndarray] = [np.empty(0)] * len(usable)
    with console.progress("calibrating", len(usable), "answers") as bar:
        for batch in _batches(order, usable):
            hidden_BTD = base.hidden_states(*_padded(base, [usable[i] for i in batch]))
            for row, index in enumerate(batch):
                answer = usable[index]
                first, count = len(answer.prompt_ids) - 1, len(answer.response_ids)
                ahead_PJ = tokens_ahead(answer.response_ids, heads.num_heads)
                hidden_PD = hidden_BTD[row, first : first + count]
                ranks[index] = token_ranks(heads, hidden_PD, ahead_PJ, num_ranks).numpy()
            bar.advance(len(batch))
    starts = np.cumsum([0] + [len(r) for r in ranks[:-1]])
    meta = {
        "base_model": base.info.name,
        "base_fingerprint": base.info.fingerprint,
        "num_answers": len(usable),
    }
    return RankStatistics(np.concatenate(ranks), starts, min(num_ranks, heads.num_columns), meta)


def tokens_ahead(response_ids: Sequence[int], num_heads: int) -> Tensor:
    """ahead_PJ: row p sits before answer token p, its root; head k's truth is token p + 1 + k."""
    T = len(response_ids)
    padded = torch.tensor([*response_ids, *[UNAVAILABLE] * num_heads])
    return torch.stack([padded[j : j + T] for j in range(num_heads + 1)], dim=1)


def _size(answer: AnswerRow) -> int:
    return len(answer.prompt_ids) + len(answer.response_ids)


def _batches(order: Sequence[int], answers: Sequence[AnswerRow]) -> Iterator[list[int]]:
    """Answers of like length together, at most BATCH_TOKENS padded tokens each."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * _size(answers[index]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def _padded(base: BaseModel, answers: Sequence[AnswerRow]) -> tuple[Tensor, Tensor]:
    """(input_ids_BT, attention_mask_BT), padded on the right."""
    T = max(_size(answer) for answer in answers)
    ids_BT = torch.zeros(len(answers), T, dtype=torch.int64)
    mask_BT = torch.zeros(len(answers), T, dtype=torch.int64)
    for row, answer in enumerate(answers):
        ids = [*answer.prompt_ids, *answer.response_ids]
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = 1
    return ids_BT.to(base.device), mask_BT.to(base.device)
