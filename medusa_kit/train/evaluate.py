"""How well heads guess on held-out text.

Shapes: P positions, K heads.
"""

import math
from dataclasses import asdict, dataclass

import torch

from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.ranks import token_ranks
from medusa_kit.train.features import FeatureStore
from medusa_kit.train.loss import heads_loss

TOP = 5


@dataclass(frozen=True)
class HeadScores:
    """One entry a head. Shares count every target, those outside a reduced projection as misses."""

    loss: list[float]  # mean cross-entropy in nats over targets with a column
    top1: list[float]
    top5: list[float]

    def as_dict(self) -> dict[str, list[float | None]]:
        """For JSON, which knows no NaN."""
        return {
            name: [None if math.isnan(value) else value for value in values]
            for name, values in asdict(self).items()
        }


@torch.no_grad()
def evaluate(heads: MedusaHeads, store: FeatureStore, chunk: int) -> HeadScores:
    """Loss, top-1 and top-5 of each head on held-out positions; NaN where a head has no target."""
    hidden_PD, ahead_PJ, *_ = store.positions
    losses = heads_loss(heads, hidden_PD, ahead_PJ, 1.0, chunk).per_head_K
    ranks_PK = token_ranks(heads, hidden_PD, ahead_PJ, TOP, chunk)
    known_PK = ranks_PK >= 0
    count_K = known_PK.sum(0)
    top1_K = (known_PK & (ranks_PK < 1)).sum(0) / count_K
    top5_K = (known_PK & (ranks_PK < TOP)).sum(0) / count_K
    return HeadScores(losses.tolist(), top1_K.tolist(), top5_K.tolist())
