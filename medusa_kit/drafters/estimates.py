"""An estimate made while decoding: how often guesses of a kind are right.

It changes how fast an answer comes, never its text. All requests of an engine share it, also in
several threads.
"""

from collections.abc import Hashable

from medusa_kit.locks import SharedLock

BELIEF = 10.0  # guesses for which what is believed beforehand counts, against those observed
MEMORY = 300.0  # guesses of a kind after which all counts are halved


class AcceptanceEstimate:
    """How often guesses of each kind were right, given that their parent was."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[float]] = {}  # key -> [right, tried]
        self._lock = SharedLock()

    def chance(self, key: Hashable, believed: float) -> float:
        """The share of right guesses; `believed` is the drafter's estimate to start from."""
        with self._lock:
            right, tried = self._seen.get(key, (0.0, 0.0))
        return (right + BELIEF * believed) / (tried + BELIEF)

    def record(self, key: Hashable, right: bool) -> None:
        with self._lock:
            seen = self._seen.setdefault(key, [0.0, 0.0])
            if seen[1] >= MEMORY:
                seen[0], seen[1] = seen[0] / 2, seen[1] / 2
            seen[0] += right
            seen[1] += 1
