"""What one forward over trees gives.

Shapes: N nodes of one tree after another, D hidden, V vocabulary, R likeliest tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from medusa_kit.infer.likeliest import likeliest, likeliest_of


class TextStates(NamedTuple):
    """What a forward gives at all tokens that it reads, one after another: hidden states, where
    torch computes them, and the outputs of watched layers, where there are any."""

    hidden: Tensor | None
    layers: Tensor | None

    @classmethod
    def joined(cls, parts: Sequence["TextStates"]) -> "TextStates":
        """Those of the pieces of one text."""
        return cls(*map(_joined, zip(*parts, strict=True)))

    def split(self, counts: Sequence[int]) -> list["TextStates"]:
        """Those of each row: of padded rows, or of all rows as one."""
        rows = (_split(part, counts) for part in self)
        return [TextStates(*both) for both in zip(*rows, strict=True)]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if parts and len(known) == len(parts) else None


def _split(part: Tensor | None, counts: Sequence[int]) -> Sequence[Tensor | None]:
    if part is None:
        return [None] * len(counts)
    if part.ndim == 2 or len(part) != len(counts):
        return part.flatten(0, -2).split(list(counts))
    return [row[:count] for row, count in zip(part, counts, strict=True)]


class Outputs(NamedTuple):
    """What a forward gives at the nodes that it is asked for."""

    hidden: Tensor
    logits: Tensor
    layers: Tensor | None = None  # outputs of watched layers, one after another

    def each(self, change: Callable[[Tensor], Tensor]) -> "Outputs":
        """All parts, changed in the same way."""
        layers = None if self.layers is None else change(self.layers)
        return Outputs(change(self.hidden), change(self.logits), layers)

    @classmethod
    def joined(cls, parts: Sequence["Outputs"]) -> "Outputs":
        """Those of one row after another."""
        hidden, logits, layers = zip(*parts, strict=True)
        return cls(torch.cat(hidden), torch.cat(logits), _joined(layers))


@dataclass(frozen=True)
class NodeScores:
    """The output of one forward over trees, for the nodes of one row after another.

    `ranked_NR`: the R likeliest tokens after each node, likeliest first, where the forward found
    them as a by-product.
    """

    hidden_ND: Tensor
    logits_NV: Tensor
    ranked_NR: Tensor | None = None
    argmax_N: Tensor | None = None  # where the forward found them
    layers_NX: Tensor | None = None  # outputs of watched layers, one after another

    @classmethod
    def of(cls, outputs: Outputs) -> "NodeScores":
        return cls(outputs.hidden, outputs.logits, layers_NX=outputs.layers)

    @classmethod
    def joined(cls, parts: Sequence["NodeScores"]) -> "NodeScores":
        """The scores of several calls, in order."""
        fields = (
            _joined([getattr(part, name) for part in parts])
            for name in ("hidden_ND", "logits_NV", "ranked_NR", "argmax_N", "layers_NX")
        )
        return cls(*fields)  # type: ignore[arg-type]  # hidden states and logits are always there

    def argmax(self) -> Tensor:
        """The token of the highest score after each node [N], or NO_TOKEN."""
        if self.argmax_N is not None:
            return self.argmax_N
        return likeliest(self.logits_NV, None if self.ranked_NR is None else self.ranked_NR[:, 0])

    def then_unknown(self, count: int) -> "NodeScores":
        """These scores, and as many nodes of NaN behind them as make `count`."""
        hidden_ND, logits_NV, ranked_NR, layers_NX = (
            None if part is None else _filled_up(part, count, filler)
            for part, filler in ((self.hidden_ND, math.nan), (self.logits_NV, math.nan),
                                 (self.ranked_NR, 0), (self.layers_NX, math.nan))
        )  # fmt: skip
        assert hidden_ND is not None
        assert logits_NV is not None
        return NodeScores(hidden_ND, logits_NV, ranked_NR, layers_NX=layers_NX)

    def ranked_argmax(self) -> list[int]:
        """The same by `ranked_NR` in the host's memory, read number by number."""
        assert self.ranked_NR is not None
        return likeliest_of(self.logits_NV, self.ranked_NR[:, 0].tolist())

    def near_ties(self, tolerance: float) -> Tensor:
        """Whether the likeliest two tokens after a node are closer than that, 0 or 1 [N]."""
        if self.ranked_NR is None:
            best_N2 = self.logits_NV.topk(2, dim=-1).values
        else:
            best_N2 = self.logits_NV.gather(1, self.ranked_NR[:, :2])
        return (best_N2[:, 0] - best_N2[:, 1] < tolerance).long()

    def ranked_near_ties(self, tolerance: float | None) -> list[int] | None:
        """Near ties, as `near_ties`, by `ranked_NR` in the host's memory, read number by number;
        None for no tolerance."""
        if tolerance is None:
            return None
        assert self.ranked_NR is not None
        best_N2 = self.ranked_NR[:, :2].numpy()
        scores_N2 = np.take_along_axis(self.logits_NV.numpy(), best_N2, axis=1).astype(float)
        near: list[int] = (scores_N2[:, 0] - scores_N2[:, 1] < tolerance).astype(int).tolist()
        return near


def _filled_up(part_NX: Tensor, count: int, filler: float) -> Tensor:
    return nn.functional.pad(part_NX, (0, 0, 0, count - len(part_NX)), value=filler)
