"""How long a step takes by the nodes in it, t(n): as first measured, and refined while decoding.

What is chosen by it changes how fast answers come, never their text. All requests of an engine
share one, also in several threads.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from medusa_kit.infer.decode.node_choice.mean import MEMORY, Mean
from medusa_kit.locks import SharedLock

SIZES = (1, 2, 4, 8, 16, 32)  # whose times are known; between them lines are drawn
SLOPE = 0.12  # the cost of one more node in one-node steps, where nothing else is known
SMOOTHING = 0.15  # share of the newest step in how fast the machine is now
OUTLIER = 2.0  # a step is taken for at most this many times the expected seconds


@dataclass
class _Size:
    """`seconds`: at the machine's usual speed. `recent`: its share of the newest steps."""

    seconds: Mean
    recent: float = 0.0


class StepCost:
    """Seconds of whole steps by their nodes, root nodes included.

    A machine gets slower and faster, so sizes are compared at equal speed: `_speed` follows the
    newest steps, of whatever size, and each size's own figure moves slowly. It moves only as far as
    the steps before were of other sizes: among equal ones a slower step says that the machine is
    slower, nothing of how sizes compare.
    """

    def __init__(
        self,
        slope: float = SLOPE,
        measured: Mapping[int, float] | None = None,
        undisturbed: bool = True,
    ) -> None:
        """`slope`: the cost of one more node in one-node steps, assumed where no seconds by nodes
        were measured. `undisturbed`: they were measured while nothing else was computed; else they
        count little, and none for more than the assumption: a size that seems too expensive is
        never tried, so decoding would not correct it."""
        weight = MEMORY if measured and undisturbed else 1.0  # what is assumed counts as one step
        first = dict(measured or {n: 1 + slope * (n - 1) for n in SIZES})
        if not undisturbed:
            first = {n: min(taken, first[1] * (1 + slope * (n - 1))) for n, taken in first.items()}
        self._sizes = {n: _Size(Mean(taken, weight)) for n, taken in sorted(first.items())}
        self._known = list(self._sizes)
        self._usual = self._at_sizes()
        self._speed = 1.0
        self.measured = bool(measured)  # whether seconds are seconds
        self._lock = SharedLock()

    def record(self, num_nodes: int, seconds: float) -> None:
        """Count a step of so many nodes."""
        if not seconds > 0:  # the clock stood still or went back: that says nothing
            return
        with self._lock:
            expected = self._at_usual_speed(num_nodes)
            if not self.measured:
                self._speed, self.measured = seconds / expected, True
                return
            around = self._around(num_nodes)
            others = 1 - sum(min(share, size.recent) for share, size in around)
            self._count(around)
            seconds = min(seconds, OUTLIER * self._speed * expected)
            self._speed += SMOOTHING * (seconds / expected - self._speed)
            ratio = seconds / (self._speed * expected)
            for share, size in around:
                usual = size.seconds.value
                size.seconds.record(usual * (1 + others * (ratio - 1)), share)
            self._usual = self._at_sizes()

    def seconds(self, num_nodes: int) -> float:
        """Expected seconds; in one-node steps where none has been measured."""
        with self._lock:
            return self._speed * self._at_usual_speed(num_nodes)

    def up_to(self, num_nodes: int) -> list[float]:
        """Expected seconds of 0, 1, … nodes (0 like 1)."""
        with self._lock:
            speed, known, usual = self._speed, self._known, self._usual
            times = [speed * usual[0]] * known[0]
            ends = [*known[1:-1], max(num_nodes + 1, known[-1])]
            for index, end in enumerate(ends):
                low, first = known[index], speed * usual[index]
                growth = speed * self._growth(index)
                times += [first + growth * more for more in range(min(end, num_nodes + 1) - low)]
        return times[: num_nodes + 1]

    def least_chance(self, num_requests: int, num_drafted: int = 0) -> float:
        """How likely one draft token beside so many requests, and so many other draft tokens, must
        be to gain; none is above 1."""
        num_nodes = num_requests + num_drafted
        before, after = self.seconds(num_nodes), self.seconds(num_nodes + 1)
        return (after - before) * num_requests / self.seconds(num_requests)

    def describe(self, num_requests: float) -> str:
        """Describe what one more node costs beside so many requests, and from which chance on a
        draft token is worth that."""
        requests = max(round(num_requests), 1)
        before, after = self.seconds(requests), self.seconds(requests + 1)
        chance = self.least_chance(requests)
        pays = (
            "no draft token is worth its cost" if chance >= 1
            else "any draft token is worth its cost" if chance < 0.005
            else f"a draft token is worth its cost from a chance of {chance:.2f} on"
        )  # fmt: skip
        nodes = "1 node takes" if requests == 1 else f"{requests} nodes take"
        return f"{nodes} {1000 * before:.1f} ms, one more {1000 * (after - before):.1f} ms: {pays}"

    # Plain Python: called at each step, where arrays would take longer than all else of it.
    def _at_sizes(self) -> list[float]:
        """The known sizes' seconds at the usual speed; more nodes never take less time."""
        return list(accumulate((size.seconds.value for size in self._sizes.values()), max))

    def _growth(self, index: int) -> float:
        """Seconds of one more node between the known size at `index` and the next one."""
        known, usual = self._known, self._usual
        return (usual[index + 1] - usual[index]) / (known[index + 1] - known[index])

    def _segment(self, num_nodes: float) -> int:
        """Index of the known size at which the line starts that `num_nodes` lies on; the last line
        goes on."""
        return min(max(bisect_right(self._known, num_nodes), 1), len(self._known) - 1) - 1

    def _at_usual_speed(self, num_nodes: float) -> float:
        index = self._segment(num_nodes)
        more = max(num_nodes - self._known[index], 0)
        return self._usual[index] + self._growth(index) * more

    def _count(self, around: Sequence[tuple[float, _Size]]) -> None:
        for size in self._sizes.values():
            size.recent *= 1 - SMOOTHING
        for share, size in around:
            size.recent += SMOOTHING * share

    def _around(self, num_nodes: int) -> list[tuple[float, _Size]]:
        """The sizes next to so many nodes, and the share of a step that counts for each."""
        index = self._segment(num_nodes)
        low, high = self._known[index], self._known[index + 1]
        share = min(max((num_nodes - low) / (high - low), 0.0), 1.0)
        return [(1 - share, self._sizes[low]), (share, self._sizes[high])]


@dataclass
class LearnedSteps:
    """The cost of steps that nobody measures beforehand."""

    cost: StepCost = field(default_factory=StepCost)
