"""How many tokens a draft model drafts: as long as it is confident enough to pay."""

import math

STEP = 0.1  # change of the threshold's logarithm at each draft
THRESHOLDS = (0.01, 0.95)
MEMORY = 0.95  # decay of the averages behind the threshold's target


class Threshold:
    """Stops a draft after the token by which its chance falls below a threshold, and never takes a
    token back, so that sampling stays exact. One for all requests.

    `cost`: the time of a draft forward in forwards of the base. The threshold follows acceptance,
    unless it is 0. It is adjusted until a draft's *last* token is accepted as often as it must be
    to pay, which is cost x tokens emitted per forward's time. On a logarithmic scale it rises by
    STEP x that target where the last token was rejected, and falls by STEP x (1 - target) where it
    was accepted, so that the share of accepted last tokens settles at the target. No clock is read,
    so runs are repeatable.
    """

    def __init__(self, threshold: float, cost: float) -> None:
        self.threshold, self.cost = threshold, cost
        self._drafted = self._accepted = 0.0  # running averages for a draft
        self._weight = 0.0

    @property
    def target(self) -> float:
        """How often a last token must be accepted to pay."""
        if not self._weight:
            return 0.5
        drafted, accepted = self._drafted / self._weight, self._accepted / self._weight
        rate = (1 + accepted) / (1 + self.cost * drafted)
        return min(max(self.cost * rate, 0.05), 0.9)

    def stops(self, chance: float) -> bool:
        return chance < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        if not self.threshold:
            return
        target = self.target
        step = STEP * (target - 1 if accepted == drafted else target)
        low, high = THRESHOLDS
        self.threshold = min(max(self.threshold * math.exp(step), low), high)
        self._drafted = MEMORY * self._drafted + drafted
        self._accepted = MEMORY * self._accepted + accepted
        self._weight = MEMORY * self._weight + 1
