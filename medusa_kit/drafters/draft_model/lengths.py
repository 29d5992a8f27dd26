"""How many tokens a draft model drafts: a fixed number, by acceptance so far, or by confidence.

A rule may stop after a token but never takes one back, so that sampling stays exact.
"""

import math
from typing import Protocol

from medusa_kit.settings.drafters import DraftModelOptions

STEP = 0.1  # change of the threshold's logarithm at each draft
THRESHOLDS = (0.01, 0.95)
MEMORY = 0.95  # decay of the averages behind the threshold's target


class Lengths(Protocol):
    """`limit` before a draft, `stops` after each of its tokens, `observe` afterwards."""

    longest: int  # tokens of any draft

    def of_request(self) -> "Lengths":
        """The rule for a new request."""

    @property
    def limit(self) -> int: ...

    def stops(self, chance: float) -> bool: ...

    def observe(self, drafted: int, accepted: int) -> None: ...


class Fixed:
    def __init__(self, length: int) -> None:
        self.longest = length

    def of_request(self) -> "Fixed":
        return self

    @property
    def limit(self) -> int:
        return self.longest

    def stops(self, chance: float) -> bool:
        return False

    def observe(self, drafted: int, accepted: int) -> None: ...


class Heuristic(Fixed):
    """Two tokens more after a fully accepted draft, one less after any other, for each row (the
    schedule of transformers' assisted generation)."""

    def __init__(self, length: int, longest: int) -> None:
        super().__init__(longest)
        self._first = self._length = min(length, longest)

    def of_request(self) -> "Heuristic":
        return Heuristic(self._first, self.longest)

    @property
    def limit(self) -> int:
        return self._length

    def observe(self, drafted: int, accepted: int) -> None:
        change = 2 if accepted == drafted else -1
        self._length = min(max(self._length + change, 1), self.longest)


class Threshold(Fixed):
    """Stops after the token by which the draft's chance falls below a threshold.

    With `cost`, the time of a draft forward in forwards of the base, the threshold follows
    acceptance: it is adjusted until a draft's *last* token is accepted as often as it must be to
    pay, which is cost x tokens emitted per forward's time. On a logarithmic scale it rises by STEP
    x that target where the last token was rejected, and falls by STEP x (1 - target) where it was
    accepted, so that the share of accepted last tokens settles at the target. No clock is read, so
    runs are repeatable.
    """

    def __init__(self, threshold: float, longest: int, cost: float | None = None) -> None:
        super().__init__(longest)
        self.threshold, self.cost = threshold, cost
        self._drafted = self._accepted = 0.0  # running averages for a draft
        self._weight = 0.0

    @property
    def target(self) -> float:
        """How often a last token must be accepted to pay."""
        if self.cost is None or not self._weight:
            return 0.5
        drafted, accepted = self._drafted / self._weight, self._accepted / self._weight
        rate = (1 + accepted) / (1 + self.cost * drafted)
        return min(max(self.cost * rate, 0.05), 0.9)

    def stops(self, chance: float) -> bool:
        return chance < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        if self.cost is None or not self.threshold:
            return
        target = self.target
        step = STEP * (target - 1 if accepted == drafted else target)
        low, high = THRESHOLDS
        self.threshold = min(max(self.threshold * math.exp(step), low), high)
        self._drafted = MEMORY * self._drafted + drafted
        self._accepted = MEMORY * self._accepted + accepted
        self._weight = MEMORY * self._weight + 1


def lengths_for(options: DraftModelOptions, cost: float) -> Lengths:
    """`cost`: of a draft forward, in forwards of the base."""
    if options.lengths == "fixed":
        return Fixed(options.length)
    if options.lengths == "heuristic":
        return Heuristic(options.length, options.max_length)
    return Threshold(options.threshold, options.max_length, cost if options.adapt else None)
