"""Queries that a layer scales by their positions, which it counts by slots (Llama 4).

Shapes: B batch, T nodes as the model gets them, H query heads, E head size.
"""

from typing import Any

import torch
from torch import Tensor

from medusa_kit.infer.attention.step import TreeStep


def scaled_by_position(module: Any, query_BHTE: Tensor, step: TreeStep) -> Tensor:
    """The queries, scaled as they would be by the positions of their nodes. Where a slot's number
    gives the same scale, which changes once in thousands of positions, they stay what they are to
    the bit."""
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query_BHTE

    def scales(positions: Tensor) -> Tensor:  # as in transformers' Llama4TextAttention
        steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    def ratios_BT() -> Tensor:
        slots_T = step.seq_length + torch.arange(query_BHTE.shape[2], device=query_BHTE.device)
        return scales(step.unpadded(step.positions())) / scales(slots_T)

    ratios = step.once(("temperature", module.floor_scale, module.attn_scale), ratios_BT)
    return (query_BHTE * ratios[:, None, :, None]).to(query_BHTE.dtype)
