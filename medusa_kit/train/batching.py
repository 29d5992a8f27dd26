"""An epoch's updates, each cut into the micro-batches of every process.

The positions of an update follow from (seed, epoch) and the update's size alone, its cut from
accumulation and processes. So runs with the same product micro-batch × accumulation × processes
train on the same updates.

Positions from memory or disk come in any order. Updates of rows that the base reads again in every
epoch hold whole rows.

Shapes: D hidden, P positions, K heads, J = K + 1 tokens ahead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.train.features.features import (
    FeatureOptions,
    Positions,
    cuts,
    run_batches,
)
from medusa_kit.train.features.rows import HeadTargets, Rows
from medusa_kit.train.loss.loss import SoftHidden, SoftTargets
from medusa_kit.train.processes import distributed


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one process: hidden states (Medusa-1), or the rows they come from."""

    ahead_PJ: Tensor
    hidden_PD: Tensor | None = None
    soft: SoftTargets | SoftHidden | None = None
    rows: Rows | None = None
    original: Positions | None = None  # the original base's predictions there (Medusa-2)

    @property
    def num_positions(self) -> int:
        return len(self.ahead_PJ)


@dataclass(frozen=True)
class Update:
    """The data of one optimiser step."""

    batches: list[Batch]  # this process's
    ahead_PJ: Tensor  # of all trained positions, of all processes


class Feed(Protocol):
    """Yields the updates of an epoch in order, from number `first` on."""

    updates_per_epoch: int

    def epoch(self, seed: int, first: int = 0) -> Iterator[Update]: ...


@dataclass(frozen=True)
class Cutting:
    """How many positions make an update, and into how many micro-batches it is cut."""

    update_positions: int
    accumulation: int = 1

    def own(self, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """This process's share of an update's parts; neighbours go to different processes."""
        return list(parts[distributed.rank() :: distributed.world()])

    @property
    def num_parts(self) -> int:
        return self.accumulation * distributed.world()


class StoredPositions(Protocol):
    """Positions that can be picked one by one: in memory, or on disk (features/cache.py)."""

    @property
    def ahead_PJ(self) -> Tensor: ...

    def rows(self, rows_P: Tensor) -> tuple[Tensor, Tensor, SoftTargets | None]: ...

    def soft_hidden(self, rows_P: Tensor) -> SoftHidden: ...


class StoredFeed:
    """Positions in any order, from memory or disk."""

    def __init__(
        self, positions: StoredPositions, cutting: Cutting, soft_all: bool = False
    ) -> None:
        self.positions, self.cutting, self.soft_all = positions, cutting, soft_all
        self.num_positions = len(positions.ahead_PJ)
        self.updates_per_epoch = max(1, round(self.num_positions / cutting.update_positions))

    def epoch(self, seed: int, first: int = 0) -> Iterator[Update]:
        generator = torch.Generator().manual_seed(seed)
        order_P = torch.randperm(self.num_positions, generator=generator)
        order_P = order_P.to(self.positions.ahead_PJ.device)
        for start, end in cuts(self.num_positions, self.updates_per_epoch)[first:]:
            parts = self.cutting.own(cuts(end - start, self.cutting.num_parts))
            batches = [self._batch(order_P[start + a : start + b]) for a, b in parts]
            yield Update(batches, self.positions.ahead_PJ[order_P[start:end]])

    def _batch(self, rows_P: Tensor) -> Batch:
        hidden_PD, ahead_PJ, soft = self.positions.rows(rows_P)
        if self.soft_all:
            return Batch(ahead_PJ, hidden_PD, self.positions.soft_hidden(rows_P))
        return Batch(ahead_PJ, hidden_PD, soft)


class LiveFeed:
    """Rows that the base reads again in every epoch, in an order that follows from (seed, epoch).

    `joint`: batches hold the rows themselves, for a base in training (`original`: the original
    base's predictions at each item's trained positions); else the hidden states from the frozen
    base.
    """

    def __init__(
        self,
        base: BaseModel,
        items: Sequence[HeadTargets],
        cutting: Cutting,
        options: FeatureOptions,
        joint: bool = False,
        original: dict[int, Positions] | None = None,
    ) -> None:
        self.base, self.items, self.cutting, self.options = base, items, cutting, options
        self.joint, self.original = joint, original
        self._sizes = [len(item.positions_P) for item in items]
        target = max(1, round(sum(self._sizes) / cutting.update_positions))
        self.updates_per_epoch = min(target, len(items))

    def epoch(self, seed: int, first: int = 0) -> Iterator[Update]:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.items), generator=generator).tolist()
        for start, end in partition([self._sizes[i] for i in order], self.updates_per_epoch)[
            first:
        ]:
            # rows of similar length share a micro-batch, so that padding is small
            chosen = sorted(order[start:end], key=lambda i: -len(self.items[i].input_ids))
            parts = self.cutting.own(
                partition([self._sizes[i] for i in chosen], self.cutting.num_parts)
            )
            batches = [self._batch(chosen[a:b], spare=chosen[-1]) for a, b in parts]
            ahead_PJ = torch.cat([torch.from_numpy(self.items[i].ahead_PJ) for i in chosen])
            yield Update(batches, ahead_PJ)

    def _batch(self, chosen: list[int], spare: int) -> Batch:
        """For an empty part the row `spare` is used without targets, since every process must do
        the same."""
        batch = self._batch_of(chosen or [spare])
        return batch if chosen else replace(batch, ahead_PJ=torch.full_like(batch.ahead_PJ, -1))

    def _batch_of(self, chosen: list[int]) -> Batch:
        items = [self.items[i] for i in chosen]
        if not self.joint:
            positions = Positions.joined(list(run_batches(self.base, items, self.options)))
            indices_P = torch.arange(len(positions.ahead_PJ), device=positions.ahead_PJ.device)
            soft = positions.soft_hidden if self.options.soft_all else positions.soft
            return Batch(positions.ahead_PJ, positions.hidden_PD, soft(indices_P))
        ahead_PJ = torch.cat([torch.from_numpy(item.ahead_PJ) for item in items])
        rows = Rows.of(items, self.base.device, self.options.packing)
        original = None
        if self.original is not None:
            original = Positions.joined([self.original[i] for i in chosen])
        return Batch(ahead_PJ.to(self.base.device), rows=rows, original=original)


def partition(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """`parts` consecutive (start, end) ranges of about equal sums.

    None is empty if there are enough items; otherwise the last ones are.
    """
    if len(sizes) < parts:
        single = [(index, index + 1) for index in range(len(sizes))]
        return single + [(len(sizes), len(sizes))] * (parts - len(sizes))
    sums = np.concatenate([[0], np.cumsum(sizes)])
    ranges, start = [], 0
    for part in range(1, parts + 1):
        goal = sums[-1] * part / parts
        end = int(np.abs(sums - goal).argmin())
        end = min(max(end, start + 1), len(sizes) - (parts - part))
        end = len(sizes) if part == parts else end
        ranges.append((start, end))
        start = end
    return ranges
