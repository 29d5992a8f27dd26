"""Hidden states of the trained positions, from one forward of the base for each batch of rows.

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
from medusa_kit.base.model import RELATIVE_TOLERANCE, BaseModel, relative_error
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.train.features.rows import HeadTargets, Rows
from medusa_kit.train.features.runners_up import read_with_runners_up
from medusa_kit.train.features.top_tokens import top_tokens
from medusa_kit.train.loss.loss import SoftHidden, SoftTargets
from medusa_kit.train.processes import distributed

# The share of free GPU memory that stored features may take; heads and logits need the rest.
DEVICE_SHARE = 0.6
WORTH_A_WORD = 1e6  # bytes


@dataclass(frozen=True)
class FeatureOptions:
    """How the base reads rows. soft_top: likeliest tokens kept for soft targets, or 0; soft_all:
    soft targets are computed from hidden states; runners_up: see runners_up.py."""

    batch_tokens: int = 8192
    soft_top: int = 0
    packing: bool = False
    soft_all: bool = False
    runners_up: bool = False

    @property
    def states(self) -> int:
        """Hidden states kept of a position."""
        return 2 if self.runners_up else 1


class Positions(NamedTuple):
    """Positions of whole examples, one example after the other, on one device.

    hidden_PD is in the base's dtype, ahead_PJ int32. likeliest_PS, chances_PS: the base's own
    predictions for the token after each position, for soft targets (S = 0 without). others_P1,
    others_PD: runners-up (runners_up.py; no columns without).
    """

    hidden_PD: Tensor
    ahead_PJ: Tensor
    likeliest_PS: Tensor
    chances_PS: Tensor
    others_P1: Tensor
    others_PD: Tensor

    @classmethod
    def without_runners_up(
        cls, hidden_PD: Tensor, ahead_PJ: Tensor, likeliest_PS: Tensor, chances_PS: Tensor
    ) -> "Positions":
        none = ahead_PJ[:, :0], hidden_PD[:, :0]
        return cls(hidden_PD, ahead_PJ, likeliest_PS, chances_PS, *none)

    @classmethod
    def empty(cls, total: int, like: "Positions", **options: Any) -> "Positions":
        return cls(*(torch.empty(total, t.shape[1], dtype=t.dtype, **options) for t in like))

    @classmethod
    def joined(cls, parts: Sequence["Positions"]) -> "Positions":
        """The positions of all parts, one after another."""
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def rows(self, rows_P: Tensor) -> tuple[Tensor, Tensor, SoftTargets | None]:
        """(hidden_PD, ahead_PJ, soft targets) of these rows."""
        return self.hidden_PD[rows_P], self.ahead_PJ[rows_P], self.soft(rows_P)

    def cut(self, top: int) -> "Positions":
        """Positions with only the `top` likeliest tokens of each, likeliest first."""
        likeliest_PS, chances_PS = self.likeliest_PS[:, :top], self.chances_PS[:, :top]
        return self._replace(likeliest_PS=likeliest_PS, chances_PS=chances_PS)

    def soft(self, rows_P: Tensor) -> SoftTargets | None:
        """The base's predictions from k + 1 positions further on are the targets of head k.

        These positions are consecutive wherever there is a target.
        """
        if not self.likeliest_PS.shape[1]:
            return None
        rows_PK = targets_of(rows_P, self.ahead_PJ)
        return SoftTargets(self.likeliest_PS[rows_PK], self.chances_PS[rows_PK])

    def soft_hidden(self, rows_P: Tensor) -> SoftHidden:
        rows_PK = targets_of(rows_P, self.ahead_PJ)
        if not self.others_P1.shape[1]:
            return SoftHidden(self.hidden_PD[rows_PK])
        others = self.others_P1[rows_PK][..., 0], self.others_PD[rows_PK]
        return SoftHidden(self.hidden_PD[rows_PK], *others)


def targets_of(rows_P: Tensor, ahead_PJ: Tensor) -> Tensor:
    """rows_PK of the position at each head's target; another one's where there is no target."""
    ahead_K = torch.arange(1, ahead_PJ.shape[1], device=rows_P.device)
    return (rows_P[:, None] + ahead_K).clamp_max(len(ahead_PJ) - 1)


def cuts(total: int, parts: int) -> list[tuple[int, int]]:
    """`parts` nearly equal (start, end) ranges that cover 0..total."""
    edges = [index * total // parts for index in range(parts + 1)]
    return list(pairwise(edges))


def batches(
    items: Sequence[HeadTargets], batch_tokens: int, packing: bool = False
) -> list[list[HeadTargets]]:
    """Consecutive items, as many in a batch as fit into `batch_tokens` tokens with padding."""
    groups: list[list[HeadTargets]] = []
    longest = total = 0
    for item in items:
        length = len(item.input_ids)
        longest, total = max(longest, length), total + length
        needed = total if packing else longest * (len(groups[-1]) + 1 if groups else 1)
        if groups and needed <= batch_tokens:
            groups[-1].append(item)
        else:
            groups.append([item])
            longest = total = length
    return groups


def by_length(items: Sequence[HeadTargets]) -> list[HeadTargets]:
    """Rows, longest first, so that padding is small and a lack of memory shows at once."""
    return sorted(items, key=lambda item: -len(item.input_ids))


def run_batches(
    base: BaseModel, items: Sequence[HeadTargets], options: FeatureOptions
) -> Iterator[Positions]:
    """The positions of consecutive items, batch by batch."""
    for group in batches(items, options.batch_tokens, options.packing):
        yield run(base, group, options)


@torch.no_grad()
def run(base: BaseModel, group: Sequence[HeadTargets], options: FeatureOptions) -> Positions:
    """The positions of one batch of examples, on the base's device."""
    ahead_PJ = torch.cat([torch.from_numpy(item.ahead_PJ) for item in group]).to(base.device)
    if options.runners_up:
        hidden_PD, *others = read_with_runners_up(base, group)
    else:
        hidden_PD = Rows.of(group, base.device, options.packing).hidden_PD(base)
        others = [ahead_PJ[:, :0], hidden_PD[:, :0]]
    guesses = top_tokens(base, hidden_PD, options.soft_top)
    return Positions(hidden_PD, ahead_PJ, *guesses, *others)


def collect_features(
    base: BaseModel,
    items: Sequence[HeadTargets],
    options: FeatureOptions,
    description: str = "features",
) -> Positions:
    """Run the base once over all items, longest first; processes share the work."""
    total = sum(len(item.positions_P) for item in items)
    storage = _storage(base, total, options)
    store: Positions | None = None
    done = 0
    rank, world = distributed.rank(), distributed.world()
    groups = batches(by_length(items), options.batch_tokens, options.packing)
    with console.progress(description, total, unit="tok") as bar:
        for index, group in enumerate(groups):
            size = sum(len(item.positions_P) for item in group)
            owner = index % world
            if owner == rank or store is None:
                positions = run(base, group, options)
            store = store or Positions.empty(total, positions, **storage)
            for kept, new in zip(store, positions, strict=True):
                # By way of the base's device: processes cannot send what lies in host memory.
                part = kept[done : done + size]
                sent = new.to(part.dtype) if owner == rank else part.to(base.device)
                distributed.broadcast(sent, owner)
                part.copy_(sent)
            done += size
            bar.advance(size)
    assert store is not None
    return store


def check_packing(base: BaseModel, items: Sequence[HeadTargets]) -> None:
    """Raises IncompatibleBaseError where packed rows affect each other."""
    with torch.no_grad():
        apart, packed = (
            Rows.of(items[:3], base.device, packing).hidden_PD(base) for packing in (False, True)
        )
    error = relative_error(packed, apart)
    if error > RELATIVE_TOLERANCE[apart.dtype]:
        raise IncompatibleBaseError(
            f"{base.info.model_type}: hidden states of packed and of separate rows differ by "
            f"{error:.1e} of their spread (allowed {RELATIVE_TOLERANCE[apart.dtype]:.0e})",
            hint="this family does not keep packed rows apart: use train.packing=false",
        )


def _storage(base: BaseModel, num_positions: int, options: FeatureOptions) -> dict[str, Any]:
    """Tensor options of the store: on the GPU where it fits, else pinned. Prints its size."""
    num_bytes = num_positions * base.info.hidden_size * base.dtype.itemsize * options.states
    storage: dict[str, Any] = {"device": base.device}
    if base.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(base.device)
        if num_bytes > DEVICE_SHARE * free_bytes:
            storage = {"device": "cpu", "pin_memory": True}
    where = "host" if torch.device(storage["device"]).type == "cpu" else "GPU"
    if num_bytes >= WORTH_A_WORD:
        size = f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"
        console.note(
            f"{num_positions:,} training tokens: {size} of hidden states in {where} memory"
        )
    return storage
