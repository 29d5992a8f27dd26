"""Heads whose guesses are verified as far as the heads are sure of them, so far as that pays.

Of a tree that is grown anew at each step, the heads say how probable every path is now. The batch
verifies those that pay beside its other rows (infer/node_choice/): none at a hard place, many where
the text is easy. Naming guesses takes time even where none of them is verified, so what steps with
heads gain is measured, whole steps against whole plain ones, and where that is nothing the heads
rest for some steps. The text is the same either way.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.drafters.heads.worth import HeadsWorth, Worth
from medusa_kit.drafters.trie import Trie, draft_of, learn, weighed
from medusa_kit.infer.draft import Draft, Drafter, State, StepResult, root_draft
from medusa_kit.infer.node_choice.choice import Offer
from medusa_kit.infer.node_choice.cost import StepCost


class ConfidentDrafter(Drafter):
    """Offers what `inner` grows at each step. `clock`: in seconds."""

    offers = True

    def __init__(
        self,
        inner: DynamicDrafter,
        record: HeadsWorth,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner, self.record, self._clock = inner, record, clock
        self.name, self.num_nodes = inner.name, inner.num_nodes
        self.steps = self.plain_steps = 0  # of each row
        self._source, self._device = HeadsSource(inner), inner.heads.base.device
        self._rest = 0  # steps before heads are asked again
        self._asked = False  # whether heads were asked in the last step
        self._step = _Step()

    def describe(self) -> str:
        if not self.plain_steps:
            return self.name
        return f"{self.name}, {self.plain_steps} of {self.steps} steps plain"

    def propose(self, state: State) -> Draft:
        """The whole tree for each row."""
        self._step = _Step()
        self.steps += len(state.roots_B)
        return self.inner.propose(state)

    def offer(self, state: State, cost: StepCost, num_others: int) -> Offer:
        """What is sure enough to pay; nothing while the heads rest."""
        num_rows = num_others + len(state.roots_B)
        worth = self.record.of_steps(num_rows, cost)
        step = self._step = _Step(state, worth, num_rows, self._clock())
        if self._rest == 0:
            self._rest = worth.plain_steps_due()
        if self._rest > 0:
            self._rest -= 1
            return Offer([[] for _ in state.roots_B])
        self._source.leave_out_below(cost.least_chance(num_rows), self.record.acceptance)
        tries = self._source.guess(state)
        step.tries = [weighed(trie, self.record.acceptance) for trie in tries]
        step.orders = [trie.by_chance() for trie in step.tries]
        return Offer([[chance for _, chance in order[1:]] for order in step.orders])

    def take(self, counts: Sequence[int]) -> Draft:
        """The likeliest guesses of each row."""
        step = self._step
        assert step.state is not None, "nothing was offered"
        self.steps += len(counts)
        self.plain_steps += counts.count(0)
        if not step.tries:
            return root_draft(step.state.roots_B, self._device)
        step.tries = [
            trie.kept([node for node, _ in order[: 1 + count]])
            for trie, order, count in zip(step.tries, step.orders, counts, strict=True)
        ]
        return draft_of(step.tries, self._device)

    def observe(self, result: StepResult) -> None:
        step = self._step
        if step.worth is None:  # the whole tree was proposed
            return
        seconds = self._clock() - step.start
        asked_before, self._asked = self._asked, bool(step.tries)
        if self._asked:
            learn(self.record.acceptance, step.tries, result)
            accepted = sum(len(path) for path in result.paths)
            self._rest = step.worth.took_with_heads(accepted / step.num_rows, seconds)
        elif not asked_before:  # else heads have taken the place of weights in the caches
            step.worth.took_plain(seconds)


@dataclass
class _Step:
    """The current step. `worth`: None where the batch does not choose what is verified."""

    state: State | None = None
    worth: Worth | None = None
    num_rows: int = 0
    start: float = 0.0
    tries: list[Trie] = field(default_factory=list)  # none: heads rest
    orders: list[list[tuple[int, float]]] = field(default_factory=list)  # nodes by chance
