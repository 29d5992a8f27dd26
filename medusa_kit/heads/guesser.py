"""What a faster way to compute the draft tokens of heads offers; infer/cpu/heads.py is one.

Shapes: K heads, X any leading shape, C draft tokens, D what heads are given of a row, J tokens of
the path, B batch, N nodes of a tree.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from medusa_kit.heads.draws import RowsDraws
from medusa_kit.tree.dynamic import Grown

Texts = Sequence[np.ndarray | None]  # text_T (int64) of each row; None: nothing is copied from it
Guesses = tuple[Tensor, Tensor]  # ids_KXC, scores_KXC (empty where not asked for)


class MinLogProbs(NamedTuple):
    """Log-probabilities that paths must have to be in a tree, and to get children."""

    keep: float = -math.inf
    expand: float = -math.inf


class Guesser(Protocol):
    """A faster way to compute the draft tokens of heads for a few rows, with rounded weights."""

    def look(self) -> None:
        """Before an answer begins: the heads may have been changed."""

    def __call__(
        self,
        heads: Sequence[int],
        hidden_XD: Tensor,
        path_XJ: Tensor | None,
        count: int,
        temperatures: Sequence[float] | None = None,
    ) -> Guesses | None:
        """None where it cannot; then the heads compute their draft tokens themselves."""

    def fill(
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        parents_N: Tensor,
        ranks_N: Tensor,
        draws: RowsDraws | None = None,
    ) -> Tensor | None:
        """tokens_BN of the tree with these parents, each node the draft token of its rank after its
        parent; None where it cannot. `draws`: of rows whose tokens will be drawn."""

    def grow(
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        num_nodes: int,
        temperatures: tuple[float, ...],
        count: int,
        beam: int,
        least: MinLogProbs,
        draws: RowsDraws | None = None,
        texts: Texts = (),
        smoothing: tuple[float, ...] = (),
    ) -> list[Grown] | None:
        """A tree of each row, of `count` draft tokens of as many heads as temperatures; None where
        it cannot. `texts`: what is copied from, if anything (drafters/heads/copying.py)."""
