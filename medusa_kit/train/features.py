"""Hidden states of the positions trained on: computed once and kept, or again every epoch.

Both feeds cut an epoch into the same number of nearly equal micro-batches, so that no update rests
on a handful of positions, and both can start in the middle of an epoch.

Shapes: B batch, T tokens, D hidden, K heads, P positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base_model import BaseModel
from medusa_kit.train.data import HeadTargets

# Share of free GPU memory that stored features may take; the rest is for heads and logits.
DEVICE_SHARE = 0.6


@dataclass(frozen=True)
class FeatureStore:
    """hidden_PD in the base's dtype, targets_PK int32; both on the device, or in host memory."""

    hidden_PD: Tensor
    targets_PK: Tensor

    def __len__(self) -> int:
        return len(self.hidden_PD)

    def epoch(self, seed: int, num_batches: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(hidden_PD, targets_PK) of each micro-batch from `first` on, positions shuffled."""
        order_P = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        order_P = order_P.to(self.hidden_PD.device)
        for start, end in cuts(len(self), num_batches)[first:]:
            rows = order_P[start:end]
            yield self.hidden_PD[rows], self.targets_PK[rows]


class LiveFeatures:
    """The same feed without the memory: the base runs again in every epoch.

    Conversations are shuffled, not positions: a micro-batch holds neighbours of few conversations.
    """

    def __init__(self, base: BaseModel, items: Sequence[HeadTargets], batch_tokens: int) -> None:
        self.base = base
        self.items = items
        self.batch_tokens = batch_tokens
        self._length = sum(len(item.positions_P) for item in items)

    def __len__(self) -> int:
        return self._length

    def epoch(self, seed: int, num_batches: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """As FeatureStore.epoch."""
        order = torch.randperm(len(self.items), generator=torch.Generator().manual_seed(seed))
        groups = batches([self.items[i] for i in order.tolist()], self.batch_tokens)
        bounds = cuts(len(self), num_batches)[first:]
        held: list[tuple[Tensor, Tensor]] = []
        held_from = held_to = 0  # the epoch's positions that `held` covers
        for group in groups:
            size = sum(len(item.positions_P) for item in group)
            if bounds and held_to + size <= bounds[0][0]:  # finished before the interruption
                held_from = held_to = held_to + size
                continue
            held.append(_run(self.base, group))
            held_to += size
            while bounds and bounds[0][1] <= held_to:
                start, end = bounds.pop(0)
                hidden_PD, targets_PK = (torch.cat(parts) for parts in zip(*held, strict=True))
                rows = slice(start - held_from, end - held_from)
                yield hidden_PD[rows], targets_PK[rows]
                held, held_from = [(hidden_PD[rows.stop :], targets_PK[rows.stop :])], end


def cuts(total: int, parts: int) -> list[tuple[int, int]]:
    """`parts` nearly equal (start, end) ranges that cover 0..total."""
    edges = [index * total // parts for index in range(parts + 1)]
    return list(pairwise(edges))


def batches(items: Sequence[HeadTargets], batch_tokens: int) -> list[list[HeadTargets]]:
    """Consecutive items, as many to a batch as fit into `batch_tokens` padded tokens."""
    groups: list[list[HeadTargets]] = []
    longest = 0
    for item in items:
        longest = max(longest, len(item.input_ids))
        if groups and longest * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(item)
        else:
            groups.append([item])
            longest = len(item.input_ids)
    return groups


def collect_features(
    base: BaseModel, items: Sequence[HeadTargets], batch_tokens: int, description: str = "features"
) -> FeatureStore:
    """Run the base once over all items, longest first (so that lack of memory shows at once)."""
    total = sum(len(item.positions_P) for item in items)
    num_heads = items[0].targets_PK.shape[1]
    place = _storage(base, total)
    hidden_PD = torch.empty(total, base.info.hidden_size, dtype=base.dtype, **place)
    targets_PK = torch.empty(total, num_heads, dtype=torch.int32, **place)
    done = 0
    by_length = sorted(items, key=lambda item: -len(item.input_ids))
    with console.progress(description, total, unit="tok") as bar:
        for group in batches(by_length, batch_tokens):
            hidden, targets = _run(base, group)
            rows = slice(done, done + len(hidden))
            hidden_PD[rows], targets_PK[rows] = hidden, targets
            done = rows.stop
            bar.advance(len(hidden))
    return FeatureStore(hidden_PD, targets_PK)


def _storage(base: BaseModel, num_positions: int) -> dict[str, Any]:
    """Tensor options of the store, after a note on its size; the GPU where it fits, else pinned."""
    num_bytes = num_positions * base.info.hidden_size * base.dtype.itemsize
    place: dict[str, Any] = {"device": base.device}
    if base.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(base.device)
        if num_bytes > DEVICE_SHARE * free_bytes:
            place = {"device": "cpu", "pin_memory": True}
    where = "host" if torch.device(place["device"]).type == "cpu" else "GPU"
    console.note(
        f"{num_positions:,} positions: {num_bytes / 1e9:.3f} GB of hidden states in {where} memory"
    )
    return place


@torch.no_grad()
def _run(base: BaseModel, group: Sequence[HeadTargets]) -> tuple[Tensor, Tensor]:
    """(hidden_PD, targets_PK) of one batch, on the base's device."""
    length = max(len(item.input_ids) for item in group)
    input_ids_BT = torch.zeros(len(group), length, dtype=torch.int64)
    mask_BT = torch.zeros_like(input_ids_BT)
    rows = []
    for index, item in enumerate(group):
        input_ids_BT[index, : len(item.input_ids)] = torch.tensor(item.input_ids)
        mask_BT[index, : len(item.input_ids)] = 1
        rows.append(torch.from_numpy(item.positions_P) + index * length)
    hidden_BTD = base.hidden_states(input_ids_BT.to(base.device), mask_BT.to(base.device))
    hidden_PD = hidden_BTD.flatten(0, 1)[torch.cat(rows).to(base.device)]
    targets_PK = torch.cat([torch.from_numpy(item.targets_PK) for item in group])
    return hidden_PD, targets_PK.to(base.device)
