"""Uses heads where they pay and plain steps elsewhere, so that hard text costs little time.

A tree's step takes as long as some number of plain ones, which tree-search measures (the
break-even). Where a window of steps emits fewer tokens than that, plain steps follow, and then
another window is tried; each failure doubles the wait. The text is the same either way.
"""

from collections.abc import Sequence
from statistics import mean

from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.infer.draft import Draft, Drafter, State, StepResult

WINDOW = 12  # steps that are judged together
SHORTEST_WAIT, LONGEST_WAIT = 48, 384  # plain steps before another try


class BreakEvenDrafter:
    """Lets `inner` propose as long as its steps emit `break_even` tokens on average."""

    def __init__(self, inner: Drafter, plain: PlainDrafter, break_even: float) -> None:
        self.inner, self.plain, self.break_even = inner, plain, break_even
        self.num_nodes = inner.num_nodes
        self.plain_steps = self.steps = 0
        self._tried: list[float] = []  # tokens that each step of the window emitted
        self._left, self._wait = 0, SHORTEST_WAIT

    @property
    def name(self) -> str:
        """Its name in statistics, with the number of plain steps if there were any."""
        if not self.plain_steps:
            return self.inner.name
        return f"{self.inner.name}, {self.plain_steps} of {self.steps} steps plain"

    def join(self, state: State) -> None:
        self.inner.join(state)

    def propose(self, state: State) -> Draft:
        return (self.plain if self._left else self.inner).propose(state)

    def observe(self, step: StepResult) -> None:
        self.inner.observe(step)
        self.steps += 1
        if self._left:
            self.plain_steps += 1
            self._left -= 1
            return
        self._tried.append(1 + mean(len(path) for path in step.paths))
        if len(self._tried) == WINDOW:
            self._judge(mean(self._tried))

    def select_rows(self, rows: Sequence[int]) -> None:
        self.inner.select_rows(rows)

    def _judge(self, emitted: float) -> None:
        self._tried.clear()
        if emitted >= self.break_even:
            self._wait = SHORTEST_WAIT
            return
        self._left, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
