"""Rows of text as the base reads them, and where their trained positions are.

Shapes: B batch, T tokens, D hidden, P positions, K heads, J = K + 1 tokens ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel


@dataclass(frozen=True)
class HeadTargets:
    """One example, ready for training."""

    input_ids: list[int]
    positions_P: np.ndarray  # int64: the tokens whose hidden state is read
    ahead_PJ: np.ndarray  # int32 ids: the root, then each head's target; -1 for no target

    @property
    def targets_PK(self) -> np.ndarray:
        return self.ahead_PJ[:, 1:]


class Rows(NamedTuple):
    """Rows of text as the base reads them: padded side by side, or packed one after another."""

    input_ids_BT: Tensor
    mask_BT: Tensor | None  # None where packed: position ids separate the rows
    position_ids_BT: Tensor | None
    flat_P: Tensor  # places of the trained positions in the flattened [B * T]

    @classmethod
    def of(cls, items: Sequence[HeadTargets], device: torch.device, packing: bool) -> "Rows":
        ids, mask, position_ids, flat = _packed(items) if packing else _padded(items)
        return cls(
            ids.to(device),
            None if mask is None else mask.to(device),
            None if position_ids is None else position_ids.to(device),
            flat.to(device),
        )

    def hidden_PD(self, base: BaseModel) -> Tensor:
        """The hidden states of the rows, with gradient where the base has any."""
        hidden_BTD = base.traced_hidden_states(
            self.input_ids_BT, self.mask_BT, self.position_ids_BT
        )
        return hidden_BTD.flatten(0, 1)[self.flat_P]


def _padded(
    items: Sequence[HeadTargets],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    length = max(len(item.input_ids) for item in items)
    input_ids_BT = torch.zeros(len(items), length, dtype=torch.int64)
    mask_BT = torch.zeros_like(input_ids_BT)
    flat = []
    for index, item in enumerate(items):
        input_ids_BT[index, : len(item.input_ids)] = torch.tensor(item.input_ids)
        mask_BT[index, : len(item.input_ids)] = 1
        flat.append(torch.from_numpy(item.positions_P) + index * length)
    return input_ids_BT, mask_BT, None, torch.cat(flat)


def _packed(
    items: Sequence[HeadTargets],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """All items in one row; where position ids restart, transformers begins another example."""
    ids = torch.cat([torch.tensor(item.input_ids) for item in items])
    position_ids = torch.cat([torch.arange(len(item.input_ids)) for item in items])
    starts = torch.tensor([0, *(len(item.input_ids) for item in items)]).cumsum(0)
    flat = [torch.from_numpy(item.positions_P) + int(start)
              for item, start in zip(items, starts[:-1], strict=True)]  # fmt: skip
    return ids[None], None, position_ids[None], torch.cat(flat)
