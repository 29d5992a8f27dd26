"""An estimate made while decoding: how often draft tokens of a kind are right.

It changes how fast an answer comes, never its text. All requests of an engine share it, also in
several threads.
"""

from collections.abc import Hashable

from medusa_kit.infer.decode.node_choice.mean import PRIOR, Mean
from medusa_kit.locks import SharedLock

CLASSES = 10  # of the chances that drafters estimate: those of one class are counted together


def chance_class(chance: float) -> int:
    """Which of the CLASSES a chance belongs to."""
    return int(CLASSES * min(chance, 0.999))


class AcceptanceEstimate:
    """How often draft tokens of each kind were right, given that their parent was."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Mean] = {}
        self._lock = SharedLock()

    def chance(self, key: Hashable, believed: float) -> float:
        """The share of right ones; `believed` is the drafter's estimate to start from."""
        with self._lock:
            if (seen := self._seen.get(key)) is None:
                return believed
            right, weight = seen.value, seen.weight
        return (weight * right + PRIOR * believed) / (weight + PRIOR)

    def record(self, key: Hashable, right: bool) -> None:
        with self._lock:
            if key not in self._seen:
                self._seen[key] = Mean(0.0, 0.0)
            self._seen[key].record(float(right))
