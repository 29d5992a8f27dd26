"""Figures measured in rounds, one after the other: who is first, ratios, intervals, a verdict.

Of two versions a ratio above 1 is better for the new one, whatever the figure: costs (seconds, MB)
are turned round. Counts are exact, so one of them decides.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from medusa_kit.bench.interval import interval_of

LEAST = 0.98  # a case is slower where its whole interval lies below
Kind = Literal["speed", "cost", "count"]
T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """`state`: fine, slower, or undecided (too few pairs for an interval). `old` and `new` are
    medians, of counts sums."""

    state: str
    pairs: int
    old: float
    new: float
    ratio: float
    low: float | None = None
    high: float | None = None


def in_turn(versions: Sequence[T], *place: object) -> list[T]:
    """An order of its own for each place in the run, the same in every run."""
    return random.Random(repr(place)).sample(versions, len(versions))


def rotated(turns: Sequence[T], number: int) -> list[T]:
    """Another one is first in each round."""
    at = number % len(turns)
    return [*turns[at:], *turns[:at]]


def spread(ratios: Sequence[float]) -> str:
    """The median with the least and the greatest."""
    if not ratios:
        return "–"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def verdict(old: Sequence[float], new: Sequence[float], kind: Kind) -> Verdict:
    """Of paired figures, each above 0 (counts may be 0)."""
    if kind == "count":
        more = any(after > before for before, after in zip(old, new, strict=True))
        ratio = sum(old) / sum(new) if any(new) else 1.0
        return Verdict("slower" if more else "fine", len(old), sum(old), sum(new), ratio)
    middle = len(old), statistics.median(old), statistics.median(new)
    ratios = [
        after / before if kind == "speed" else before / after
        for before, after in zip(old, new, strict=True)
    ]
    found = interval_of(ratios)
    if found is None:
        return Verdict("undecided", *middle, statistics.median(ratios))
    state = "slower" if found.high < LEAST else "fine"
    return Verdict(state, *middle, statistics.median(ratios), found.low, found.high)
