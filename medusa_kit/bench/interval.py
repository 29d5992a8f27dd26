"""A ratio of two speeds with its interval, from pairs measured on the same prompts.

The ratio is the Hodges-Lehmann estimate, the interval that of Wilcoxon's signed-rank test, both of
logarithms. Six pairs suffice. A pair that other work on the machine disturbed widens the interval
and hardly moves the ratio.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A ratio, and what it lies between with a confidence of at least CONFIDENCE."""

    ratio: float
    low: float
    high: float

    @property
    def holds_one(self) -> bool:
        return self.low <= 1.0 <= self.high


def interval_of(ratios: Sequence[float]) -> Interval | None:
    """The interval of paired ratios, each above 0; None where they are too few for one."""
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(logs, 2))
    cut = _cut(len(logs))
    if cut is None:
        return None
    bounds = (statistics.median(means), means[cut], means[-1 - cut])
    return Interval(*(math.exp(log) for log in bounds))


def _cut(count: int) -> int | None:
    """How many of the least and of the greatest means of pairs lie outside the interval."""
    ways = [1]  # ways[w]: sets of the ranks 1 to `count` with the sum w
    for rank in range(1, count + 1):
        wider = ways + [0] * rank
        for total, number in enumerate(ways):
            wider[total + rank] += number
        ways = wider
    allowed, below = (1 - CONFIDENCE) / 2 * 2**count, 0
    for cut, number in enumerate(ways):
        below += number
        if below > allowed:
            return cut - 1 if cut else None
    return None
