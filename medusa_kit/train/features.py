"""Hidden states of the positions trained on: computed once and kept, or again every epoch.

Both feeds cut an epoch into the same number of nearly equal micro-batches, so that no update rests
on a handful of positions, and both can start in the middle of an epoch.

Shapes: B batch, T tokens, D hidden, P positions, K heads, J = K + 1 tokens ahead (the root, then
each head's target), S likeliest tokens of the base.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base_model import BaseModel
from medusa_kit.train.data import HeadTargets
from medusa_kit.train.loss import SoftTargets

LOGIT_ROWS = 1024  # rows of the base's logits that exist at once, for soft targets
# Share of free GPU memory that stored features may take; the rest is for heads and logits.
DEVICE_SHARE = 0.6


class Batch(NamedTuple):
    """A micro-batch, as the loss takes it."""

    hidden_PD: Tensor
    ahead_PJ: Tensor
    soft: SoftTargets | None

    @property
    def num_positions(self) -> int:
        return len(self.ahead_PJ)


class Positions(NamedTuple):
    """Positions of whole examples, one example after the other, on one device.

    hidden_PD is in the base's dtype, ahead_PJ int32. likeliest_PS, chances_PS: the base's own
    guesses for the token after each position, where soft targets are asked for (S = 0 otherwise).
    """

    hidden_PD: Tensor
    ahead_PJ: Tensor
    likeliest_PS: Tensor
    chances_PS: Tensor

    @classmethod
    def empty(cls, total: int, like: "Positions", **place: Any) -> "Positions":
        return cls(*(torch.empty(total, t.shape[1], dtype=t.dtype, **place) for t in like))

    def batch(self, rows_P: Tensor) -> Batch:
        """The micro-batch of these rows.

        Head k's target stands where the base looked ahead from k + 1 positions further on; those
        lie next to each other wherever there is a target.
        """
        soft = None
        if self.likeliest_PS.shape[1]:
            ahead_K = torch.arange(1, self.ahead_PJ.shape[1], device=rows_P.device)
            rows_PK = (rows_P[:, None] + ahead_K).clamp_max(len(self.ahead_PJ) - 1)
            soft = SoftTargets(self.likeliest_PS[rows_PK], self.chances_PS[rows_PK])
        return Batch(self.hidden_PD[rows_P], self.ahead_PJ[rows_P], soft)


@dataclass(frozen=True)
class FeatureStore:
    """All positions, on the base's device or in host memory."""

    positions: Positions

    def __len__(self) -> int:
        return len(self.positions.ahead_PJ)

    def epoch(self, seed: int, num_batches: int, first: int = 0) -> Iterator[Batch]:
        """Each micro-batch from `first` on, positions shuffled."""
        order_P = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        order_P = order_P.to(self.positions.ahead_PJ.device)
        for start, end in cuts(len(self), num_batches)[first:]:
            yield self.positions.batch(order_P[start:end])


class LiveFeatures:
    """The same feed without the memory: the base runs again in every epoch.

    Conversations are shuffled, not positions: a micro-batch holds neighbours of few conversations.
    """

    def __init__(
        self, base: BaseModel, items: Sequence[HeadTargets], batch_tokens: int, soft_top: int = 0
    ) -> None:
        self.base = base
        self.items = items
        self.batch_tokens = batch_tokens
        self.soft_top = soft_top
        self._length = sum(len(item.positions_P) for item in items)

    def __len__(self) -> int:
        return self._length

    def epoch(self, seed: int, num_batches: int, first: int = 0) -> Iterator[Batch]:
        """As FeatureStore.epoch."""
        order = torch.randperm(len(self.items), generator=torch.Generator().manual_seed(seed))
        groups = batches([self.items[i] for i in order.tolist()], self.batch_tokens)
        bounds = cuts(len(self), num_batches)[first:]
        held: list[Positions] = []
        held_from = held_to = 0  # the epoch's positions that `held` covers
        for group in groups:
            size = sum(len(item.positions_P) for item in group)
            if bounds and held_to + size <= bounds[0][0]:  # finished before the interruption
                held_from = held_to = held_to + size
                continue
            held.append(_run(self.base, group, self.soft_top))
            held_to += size
            while bounds and bounds[0][1] <= held_to:
                start, end = bounds.pop(0)
                whole = Positions(*(torch.cat(parts) for parts in zip(*held, strict=True)))
                device = whole.ahead_PJ.device
                yield whole.batch(torch.arange(start - held_from, end - held_from, device=device))
                held = [Positions(*(part[end - held_from :] for part in whole))]
                held_from = end


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
    base: BaseModel,
    items: Sequence[HeadTargets],
    batch_tokens: int,
    description: str = "features",
    soft_top: int = 0,
) -> FeatureStore:
    """Run the base once over all items, longest first (so that lack of memory shows at once).

    `soft_top`: how many of the base's own guesses to keep for soft targets.
    """
    total = sum(len(item.positions_P) for item in items)
    place = _storage(base, total)
    store: Positions | None = None
    done = 0
    by_length = sorted(items, key=lambda item: -len(item.input_ids))
    with console.progress(description, total, unit="tok") as bar:
        for group in batches(by_length, batch_tokens):
            found = _run(base, group, soft_top)
            store = store or Positions.empty(total, found, **place)
            size = len(found.ahead_PJ)
            for kept, new in zip(store, found, strict=True):
                kept[done : done + size] = new
            done += size
            bar.advance(size)
    assert store is not None
    return FeatureStore(store)


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
def _run(base: BaseModel, group: Sequence[HeadTargets], soft_top: int) -> Positions:
    """The positions of one batch of examples, on the base's device."""
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
    ahead_PJ = torch.cat([torch.from_numpy(item.ahead_PJ) for item in group]).to(base.device)
    return Positions(hidden_PD, ahead_PJ, *_likeliest(base, hidden_PD, soft_top))


def _likeliest(base: BaseModel, hidden_PD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids_PS int32, probabilities_PS float32) of the base's likeliest next tokens."""
    ids_PS = torch.empty(len(hidden_PD), count, dtype=torch.int32, device=hidden_PD.device)
    chances_PS = torch.empty(len(hidden_PD), count, device=hidden_PD.device)
    for start in range(0, len(hidden_PD) if count else 0, LOGIT_ROWS):
        rows = slice(start, start + LOGIT_ROWS)
        top = base.head_logits(hidden_PD[rows]).float().softmax(-1).topk(count)
        ids_PS[rows], chances_PS[rows] = top.indices.int(), top.values
    return ids_PS, chances_PS
