"""Evaluates heads on held-out text: their predictions, and the acceptance length to expect.

Shapes: P positions, K heads, J = K + 1 tokens ahead.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from medusa_kit.base.faults.finite import not_finite
from medusa_kit.errors import TreeError
from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.ranks import token_ranks
from medusa_kit.train.data import stretch_starts
from medusa_kit.train.features.features import Positions
from medusa_kit.train.features.rows import HeadTargets
from medusa_kit.train.finite import heads_among
from medusa_kit.train.loss.loss import LossOptions, heads_loss
from medusa_kit.tree.search import best_trees
from medusa_kit.tree.statistics import RankStatistics

TOP = 5
NUM_RANKS = 32
NUM_NODES = 16  # of the tree that acceptance is simulated with


@dataclass(frozen=True)
class HeadScores:
    """One entry for each head. A target outside a reduced projection counts as a miss."""

    loss: list[float]  # mean cross-entropy in nats over targets with a column
    top1: list[float]
    top5: list[float]
    # With the best tree of 16 nodes, searched on each half of the held-out rows and replayed on the
    # other; None where there are too few rows.
    acceptance_length: float | None = None
    hidden_finite: bool = True  # whether all hidden states of the held-out rows are numbers

    @property
    def without_loss(self) -> list[str]:
        """Heads that have targets, and a loss that is NaN or infinite."""
        pairs = zip(self.loss, self.top1, strict=True)
        return heads_among([0.0 if math.isnan(top1) else loss for loss, top1 in pairs])

    def as_dict(self) -> dict[str, object]:
        """The scores, for JSON, which has no NaN."""
        found = asdict(self)
        del found["hidden_finite"]
        for name in ("loss", "top1", "top5"):
            found[name] = [None if math.isnan(value) else value for value in found[name]]
        return found


@torch.no_grad()
def evaluate(
    heads: MedusaHeads,
    store: Positions,
    chunk: int,
    starts: np.ndarray | None = None,
    contents_A2: np.ndarray | None = None,
) -> HeadScores:
    """Loss, top-1, top-5 and simulated acceptance; NaN where a head has no target.

    `starts`: where each stretch of the assistant's text begins among the positions (answer_starts);
    `contents_A2`: what each says (stretch_contents).
    """
    hidden_PD, ahead_PJ = store.hidden_PD, store.ahead_PJ
    options = LossOptions(decay=1.0, chunk=chunk)
    losses = heads_loss(heads, hidden_PD, ahead_PJ, options).per_head_K
    num_ranks = min(NUM_RANKS, heads.num_columns)
    ranks_PK = token_ranks(heads, hidden_PD, ahead_PJ, num_ranks, chunk)
    known_PK = ranks_PK >= 0
    count_K = known_PK.sum(0)
    losses[count_K.to(losses.device) == 0] = math.nan
    top1_K = (known_PK & (ranks_PK < 1)).sum(0) / count_K
    top5_K = (known_PK & (ranks_PK < TOP)).sum(0) / count_K
    length = None
    if starts is not None:
        length = simulated_acceptance(ranks_PK.numpy(), starts, num_ranks, contents_A2)
    sound = not not_finite(hidden_PD)
    return HeadScores(losses.tolist(), top1_K.tolist(), top5_K.tolist(), length, sound)


def simulated_acceptance(
    ranks_PK: np.ndarray,
    starts: np.ndarray,
    num_ranks: int,
    contents_A2: np.ndarray | None = None,
) -> float | None:
    """Acceptance length by replay on rows that the tree was not searched on."""
    try:
        statistics = RankStatistics(ranks_PK, starts, num_ranks, contents_A2=contents_A2)
        one, other = statistics.split(0.5, 0)
        lengths = [
            best_trees(fit, [NUM_NODES], judge, rounds=0)[NUM_NODES].replayed_length
            for fit, judge in ((one, other), (other, one))
        ]
    except TreeError:  # a single row, or heads with fewer paths than nodes
        return None
    return sum(lengths) / len(lengths)


def answer_starts(items: Sequence[HeadTargets]) -> np.ndarray:
    """Where each stretch of the assistant's tokens begins among the trained positions of all."""
    starts, done = [], 0
    for item in items:
        starts += (done + stretch_starts(item)).tolist()
        done += len(item.positions_P)
    return np.array(starts, dtype=np.int64)
