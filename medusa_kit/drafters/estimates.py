"""An estimate made while decoding: how often guesses of a kind are right.

It changes how fast an answer comes, never its text. All requests of an engine share it, also in
several threads.
"""

from collections.abc import Hashable, Mapping

from medusa_kit.locks import SharedLock

# Guesses for which a drafter's own estimate counts, and a chance measured beforehand, against those
# observed.
BELIEF, MEASURED_BELIEF = 6.0, 20.0
MEMORY = 300.0  # guesses of a kind after which all counts are halved
# Of guesses of heads before any step: of the first head's likeliest one, and how much less each
# further depth and rank has (recurrent heads of a small model: 0.60, 0.99 and 0.21 to 0.43).
FIRST_GUESS, DEEPER, NEXT_RANK = 0.5, 0.9, 0.3
MAX_CERTAIN = 0.97  # the highest chance of any kind of guess


class AcceptanceEstimate:
    """How often guesses of each kind were right, given that their parent was."""

    def __init__(self, first: Mapping[Hashable, float] | None = None) -> None:
        """`first`: chances of kinds of guesses that were measured beforehand, which count in place
        of the drafter's own estimate."""
        self._first = first or {}
        self._seen: dict[Hashable, list[float]] = {}  # key -> [right, tried]
        self._lock = SharedLock()

    def chance(self, key: Hashable, believed: float, weight: float = BELIEF) -> float:
        """The share of right guesses; `believed` is the drafter's estimate to start from, where
        none was measured, and `weight` the guesses for which it counts."""
        if (measured := self._first.get(key)) is not None:
            believed, weight = measured, MEASURED_BELIEF
        with self._lock:
            right, tried = self._seen.get(key, (0.0, 0.0))
        return min((right + weight * believed) / (tried + weight), MAX_CERTAIN)

    def record(self, key: Hashable, right: bool) -> None:
        with self._lock:
            seen = self._seen.setdefault(key, [0.0, 0.0])
            if seen[1] >= MEMORY:
                seen[0], seen[1] = seen[0] / 2, seen[1] / 2
            seen[0] += right
            seen[1] += 1
