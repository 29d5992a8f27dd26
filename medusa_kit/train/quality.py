"""Compares the base that Medusa-2 trained, which is a new model, with the original.

Shapes: P positions, D hidden, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import numpy as np
import torch

from medusa_kit.base.model import BaseModel
from medusa_kit.train.features.features import FeatureOptions, batches, by_length, run
from medusa_kit.train.features.rows import HeadTargets
from medusa_kit.train.features.top_tokens import LOGIT_ROWS


@dataclass(frozen=True)
class Readings:
    """A model's predictions at every held-out position, one example after the other."""

    surprise_P: torch.Tensor  # nats, of the token in the text
    greedy_P: torch.Tensor  # the model's own greedy token
    starts: np.ndarray  # where each example begins

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(float(self.surprise_P.double().mean()))
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Quality:
    """The base before and after, teacher-forced on held-out rows."""

    perplexity_before: float
    perplexity_after: float
    same_token: float  # share of positions with the same greedy token as the original
    same_answer: float  # share of rows in which that holds at every position

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has neither NaN nor infinity."""
        found = asdict(self)
        return {name: value if math.isfinite(value) else None for name, value in found.items()}


@torch.no_grad()
def read(
    base: BaseModel,
    items: Sequence[HeadTargets],
    options: FeatureOptions,
    whole: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Readings:
    """Run the model over held-out rows. `whole`: a context that gathers the output embedding."""
    surprise, greedy, sizes = [], [], []
    for group in batches(by_length(items), options.batch_tokens, options.packing):
        positions = run(base, group, FeatureOptions(options.batch_tokens, 0, options.packing))
        roots_P = positions.ahead_PJ[:, 0].long()
        with whole():
            for start in range(0, len(roots_P), LOGIT_ROWS):
                rows = slice(start, start + LOGIT_ROWS)
                log_chance_CV = base.head_logits(positions.hidden_PD[rows]).float().log_softmax(-1)
                surprise.append(-log_chance_CV.gather(1, roots_P[rows, None])[:, 0].cpu())
                greedy.append(log_chance_CV.argmax(-1).cpu())
        sizes += [len(item.positions_P) for item in group]
    starts = np.cumsum([0, *sizes[:-1]])
    return Readings(torch.cat(surprise), torch.cat(greedy), starts)


def compare(before: Readings, after: Readings) -> Quality:
    same_P = (before.greedy_P == after.greedy_P).numpy()
    return Quality(
        before.perplexity,
        after.perplexity,
        float(same_P.mean()),
        float(np.logical_and.reduceat(same_P, before.starts).mean()),
    )
