"""Heads whose guesses are verified as far as the heads are sure of them, so far as that pays.

Of a tree that is grown anew at each step, the heads say how probable every path is now. The batch
verifies those that pay beside its other rows (infer/node_choice/): none at a hard place, many where
the text is easy. Naming guesses takes time even where none of them is verified, so what steps with
heads gain is measured, whole steps against whole plain ones, and where that is nothing the heads
rest for some steps. The text is the same either way.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from medusa_kit.drafters.asking import Asking
from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.drafters.trie import Trie, draft_of, learn, weighed
from medusa_kit.infer.draft import Draft, State, StepResult, root_draft
from medusa_kit.infer.node_choice.choice import Offer
from medusa_kit.infer.node_choice.cost import StepCost
from medusa_kit.locks import SharedLock

SMOOTHING = 0.02  # share of the newest step in what heads have been worth
FIRST_PLAIN = 6  # plain steps at first, by which the others are judged
PLAIN, BETWEEN = 4, 256  # so many plain steps after so many with heads: the machine's speed changes
NEWEST = 0.3  # share of the newest plain step in what one takes
OUTLIER = 2.0  # a step counts for at most this many times what a plain one takes
DEAR = 0.6  # chance that a guess must have to pay, from which on heads rest long from the start
LONG_REST = 8


@dataclass
class ConfidentRecord:
    """What all requests of an engine have seen of heads: how often guesses of a kind were right,
    and what steps with heads were worth, by about how many rows they had."""

    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    _plain: dict[int, float] = field(default_factory=dict)  # seconds
    _untimed: Counter[int] = field(default_factory=Counter)  # steps since a plain one was timed
    _asking: dict[int, Asking] = field(default_factory=dict)
    _lock: SharedLock = field(default_factory=SharedLock, repr=False, compare=False)

    def plain(self, num_rows: int) -> float | None:
        """Seconds of a plain step of about so many rows; None before the first."""
        with self._lock:
            return self._plain.get(num_rows.bit_length())

    def took_plain(self, num_rows: int, seconds: float) -> None:
        about = num_rows.bit_length()
        with self._lock:
            known = self._plain.get(about, seconds)
            newest = min(seconds, OUTLIER * known)
            self._plain[about] = known + NEWEST * (newest - known)
            self._untimed[about] = 0

    def took_with_heads(self, num_rows: int) -> None:
        with self._lock:
            self._untimed[num_rows.bit_length()] += 1

    def plain_steps_due(self, num_rows: int) -> int:
        """How many plain steps are to be taken now, to time them."""
        about = num_rows.bit_length()
        with self._lock:
            if about not in self._plain:
                return FIRST_PLAIN
            return PLAIN if self._untimed[about] >= BETWEEN else 0

    def asking(self, num_rows: int, cost: StepCost) -> Asking:
        about = num_rows.bit_length()
        with self._lock:
            if about not in self._asking:
                dear = cost.least_chance(num_rows) >= DEAR
                self._asking[about] = Asking(LONG_REST if dear else 0, SMOOTHING)
            return self._asking[about]


class ConfidentDrafter:
    """Offers what `inner` grows at each step. `clock`: in seconds."""

    def __init__(
        self,
        inner: DynamicDrafter,
        record: ConfidentRecord,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner, self.record, self._clock = inner, record, clock
        self.num_nodes = inner.num_nodes
        self.steps = self.plain_steps = 0  # of each row
        self._source = HeadsSource(inner)
        self._rest = 0  # steps before heads are asked again
        self._asked = False  # whether heads were asked in the last step
        self._step = _Step()

    @property
    def name(self) -> str:
        """Its name in statistics, with the number of plain steps if there were any."""
        if not self.plain_steps:
            return self.inner.name
        return f"{self.inner.name}, {self.plain_steps} of {self.steps} steps plain"

    def join(self, state: State) -> None:
        self.inner.join(state)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.inner.select_rows(rows)

    def propose(self, state: State) -> Draft:
        """The whole tree for each row."""
        self._step = _Step()
        self.steps += len(state.roots_B)
        return self.inner.propose(state)

    def offer(self, state: State, cost: StepCost, num_others: int) -> Offer:
        """What is sure enough to pay; nothing while the heads rest."""
        num_rows = num_others + len(state.roots_B)
        step = self._step = _Step(state, cost, num_rows, self._clock())
        if self._rest == 0:
            self._rest = self.record.plain_steps_due(num_rows)
        if self._rest > 0:
            self._rest -= 1
            return Offer([[] for _ in state.roots_B])
        self._source.leave_out_below(cost.least_chance(num_rows))
        tries = self._source.guess(state)
        step.tries = [weighed(trie, self.record.acceptance) for trie in tries]
        step.orders = [trie.by_chance() for trie in step.tries]
        return Offer([[chance for _, chance in order[1:]] for order in step.orders])

    def take(self, counts: Sequence[int]) -> Draft:
        """The likeliest guesses of each row."""
        step, device = self._step, self.inner.heads.base.device
        assert step.state is not None, "nothing was offered"
        self.steps += len(counts)
        self.plain_steps += sum(not count for count in counts)
        step.tries = [
            trie.kept([node for node, _ in order[: 1 + count]])
            for trie, order, count in zip(step.tries, step.orders, counts, strict=bool(step.tries))
        ]
        if not any(counts):
            return root_draft(step.state.roots_B, device)
        return draft_of(step.tries, device)

    def observe(self, result: StepResult) -> None:
        step, record = self._step, self.record
        if step.cost is None:  # the whole tree was proposed
            return
        seconds = self._clock() - step.start
        asked_before, self._asked = self._asked, bool(step.tries)
        if not self._asked:
            if not asked_before:  # else heads have taken the place of weights in the caches
                record.took_plain(step.num_rows, seconds)
            return
        record.took_with_heads(step.num_rows)
        learn(record.acceptance, step.tries, result)
        plain = record.plain(step.num_rows) or step.cost.seconds(step.num_rows)
        accepted = sum(len(path) for path in result.paths)
        longer = min(seconds, (1 + OUTLIER) * plain) / plain - 1
        asking = record.asking(step.num_rows, step.cost)
        self._rest = asking.record(accepted / step.num_rows - longer, True)


@dataclass
class _Step:
    """The current step. `cost`: None where the batch does not choose what is verified."""

    state: State | None = None
    cost: StepCost | None = None
    num_rows: int = 0
    start: float = 0.0
    tries: list[Trie] = field(default_factory=list)  # none: heads rest
    orders: list[list[tuple[int, float]]] = field(default_factory=list)  # nodes by chance
