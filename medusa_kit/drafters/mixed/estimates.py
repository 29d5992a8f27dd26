"""Estimates made while decoding: how often guesses of a kind are right, how long a step takes.

They change how fast an answer comes, never its text. All requests of an engine share them, also in
several threads.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from medusa_kit.locks import SharedLock

BELIEF = 6.0  # guesses for which a drafter's own estimate counts, against those observed
MEMORY = 300.0  # guesses of a kind after which all counts are halved
MOST_CERTAIN = 0.97  # the highest chance of any kind of guess
SMOOTHING = 0.15  # share of the newest step in a running mean
OUTLIER = 2.0  # a step is taken for at most this many times the expected seconds
KNOWN_WELL = 6  # steps of a size from which on their own mean is used


class AcceptanceEstimate:
    """How often guesses of each kind were right, given that their parent was."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[float]] = {}  # key -> [right, tried]
        self._lock = SharedLock()

    def chance(self, key: Hashable, believed: float) -> float:
        """The share of right guesses; `believed` is the drafter's estimate to start from."""
        with self._lock:
            right, tried = self._seen.get(key, (0.0, 0.0))
        return min((right + BELIEF * believed) / (tried + BELIEF), MOST_CERTAIN)

    def record(self, key: Hashable, right: bool) -> None:
        with self._lock:
            seen = self._seen.setdefault(key, [0.0, 0.0])
            if seen[1] >= MEMORY:
                seen[0], seen[1] = seen[0] / 2, seen[1] / 2
            seen[0] += right
            seen[1] += 1


@dataclass
class _Mean:
    seconds: float
    count: int = 1

    def add(self, seconds: float) -> None:
        self.count += 1
        share = max(1 / self.count, SMOOTHING)
        self.seconds += share * (min(seconds, OUTLIER * self.seconds) - self.seconds)


class StepCost:
    """Seconds of a verify step by the nodes in it: running means, and a line through them."""

    def __init__(self, slope: float) -> None:
        """`slope`: the cost of one more node in one-node steps, until it has been measured."""
        self._slope = slope
        self._means: dict[int, _Mean] = {}
        self._fitted: tuple[float, float] | None = None  # the line, until the next step
        self._lock = SharedLock()

    @property
    def measured(self) -> bool:
        return bool(self._means)

    def record(self, num_nodes: int, seconds: float) -> None:
        with self._lock:
            self._fitted = None
            if num_nodes in self._means:
                self._means[num_nodes].add(seconds)
            else:
                self._means[num_nodes] = _Mean(seconds)

    def seconds(self, num_nodes: int) -> float:
        """Expected seconds; before any step, in units of a step with one node."""
        with self._lock:
            mean = self._means.get(num_nodes)
            if mean is not None and mean.count >= KNOWN_WELL:
                return mean.seconds
            self._fitted = self._fitted or self._line()
            start, slope = self._fitted
        return max(start + slope * (num_nodes - 1), 0.5 * start)

    def _line(self) -> tuple[float, float]:
        """(seconds of a one-node step, seconds for each further node), by weighted least squares.

        The assumed slope counts as if some steps of many nodes had confirmed it.
        """
        if not self._means:
            return 1.0, self._slope
        points = [(n - 1, m.seconds, min(m.count, 20)) for n, m in self._means.items()]
        total = sum(w for _, _, w in points)
        mean_x = sum(w * x for x, _, w in points) / total
        mean_y = sum(w * y for _, y, w in points) / total
        start = mean_y / (1 + self._slope * mean_x)
        spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
        slant = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points)
        belief = 8.0  # the spread of two steps, four nodes apart
        slope = max((slant + belief * self._slope * start) / (spread + belief), 0.0)
        return max(mean_y - slope * mean_x, 0.1 * mean_y), slope
