"""Chooses at each position what pays: which sources to ask and how many nodes to verify, if any.

Free sources (text and tables) are asked at every step. How many of the merged guesses are verified
follows from their chances and from what a node costs on this machine, measured while decoding.
Heads and draft models cost time: `Chooser` learns where they pay.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.mixed.combined import (
    build_sources,
    credited,
    merged,
    shared_estimate,
    usual_sources,
)
from medusa_kit.drafters.mixed.experience import Experience
from medusa_kit.drafters.mixed.shares import PLAIN, Share, percentages, sources_of, tokens_a_step
from medusa_kit.drafters.mixed.step import Step, best_size
from medusa_kit.drafters.trie import TrieDrafter, draft_of, learn
from medusa_kit.infer.draft import (
    Draft,
    Drafter,
    RequestText,
    State,
    StepResult,
    root_draft,
)
from medusa_kit.infer.node_choice.choice import Offer, choose_nodes
from medusa_kit.infer.node_choice.cost import StepCost

COSTLY = ("medusa", "draft-model", "mtp")
SLOPES = {"cpu": 0.12, "cuda": 0.01}  # cost of one more node in one-node steps, until measured
ASKING = 0.15  # of a plain step: what heads are assumed to take before they are first asked
# Tokens a step that a costly source adds, at first; MTP layers draft as a small model does.
HOPES = {"medusa": 0.5, "draft-model": 1.0, "mtp": 1.0}


@dataclass
class AutoDrafter(Drafter):
    """Asks `free` sources at every step and one of `costly` where it pays. `clock`: in seconds."""

    free: Sequence[TrieDrafter]
    costly: Sequence[TrieDrafter]
    experience: Experience
    device: Any
    max_nodes: int
    reasons: Sequence[str] = ()
    chains: bool = False  # whether a row's guesses must follow one another
    clock: Callable[[], float] = time.perf_counter
    shares: dict[str, Share] = field(default_factory=dict)
    credits: list[list[str]] = field(default_factory=list)
    _step: Step | None = None
    _end: float = 0.0  # of the last step; 0: there was none, or rows have joined since
    _last_choice: int = 0
    _rest: int = 0  # steps until sources are asked again
    _resting: Sequence[int] | None = None  # the rows' roots, where nobody is asked in this step

    name = "auto"
    offers = True

    def __post_init__(self) -> None:
        sources = self._sources
        self.num_nodes = self.max_nodes
        self.num_ranks = max((source.num_ranks for source in sources), default=0)
        self.reads_prompts = any(source.reads_prompts for source in sources)
        self.watches = tuple(layer for source in sources for layer in source.watches)

    @property
    def _sources(self) -> Sequence[TrieDrafter]:
        return (*self.free, *self.costly)

    def describe(self) -> str:
        """`auto`, and how often each source drafted."""
        return f"auto ({percentages(self.shares)})" if self.shares else "auto"

    @property
    def notes(self) -> list[str]:
        sources = [note for source in self._sources for note in source.notes]
        return [*self.reasons, *tokens_a_step(self.shares), *sources]

    def begin(self, request: RequestText) -> None:
        self.experience.new_text()
        self._end = 0.0
        for source in self._sources:
            source.begin(request)

    def propose(self, state: State) -> Draft:
        """Its own choice of guesses: equally many for each row, by what it has measured itself."""
        cost, self._resting = self.experience.cost, None
        step = self._guess(state, cost, 0)
        size, _ = best_size(step.orders, cost, self.max_nodes)
        step.timed_here = True
        return self.take([size - 1] * len(state.roots_B))

    def offer(self, state: State, cost: StepCost, num_others: int) -> Offer:
        """The likeliest guesses; none while asking for them does not pay."""
        forced = any(one is not None and one.mask is not None for one in state.samplers)
        if self._rest > 0 and not forced:  # what a grammar forces costs nothing to name
            self._rest, self._resting = self._rest - 1, state.roots_B
            self.experience.chooser(num_others + len(state.roots_B), cost).rested()
            return Offer([[] for _ in state.roots_B])
        self._resting = None
        return self._guess(state, cost, num_others).offer(self.max_nodes)

    def _guess(self, state: State, cost: StepCost, num_others: int) -> Step:
        """Ask the free sources, and a costly one where that should pay."""
        start, acceptance = self.clock(), self.experience.acceptance
        rows = num_others + len(state.roots_B)
        if cost.measured:
            for source in self.free:
                source.leave_out_below(cost.least_chance(rows), acceptance)
        tries = merged(self.free, state, acceptance)
        self._step = step = Step(tries, cost, num_others, start, self.chains)
        if cost.measured:
            self._choose(step, state)
        return step

    def _choose(self, step: Step, state: State) -> None:
        """Ask a costly source where it should pay."""
        step.chooser = self.experience.chooser(step.num_rows, step.cost)
        gap = self.clock() - self._end if self._end else 0.0
        step.promise(*self._promised(step), step.chooser.between(gap))
        step.situation, step.choice = step.chooser.choose(
            step.promised / len(step.tries), lambda choice: self._expected(choice, step)
        )
        if step.choice != self._last_choice:  # what it reads has left the caches
            step.cost.leave_out_next()
        self._last_choice = step.choice
        if step.choice:
            source, start = self.costly[step.choice - 1], self.clock()
            acceptance = self.experience.acceptance
            source.leave_out_below(step.cost.least_chance(step.num_rows), acceptance)
            step.merge(merged([source], state, acceptance))
            step.asking = self.clock() - start

    def _expected(self, choice: int, step: Step) -> float | None:
        """What a row's step gains by this choice; None where it was not calibrated."""
        if (calibrated := self.experience.calibrated.get(choice)) is None:
            return None
        asking = ASKING * step.cost.seconds(step.num_rows)
        return step.expected_gain(calibrated, asking, self.max_nodes)

    def _promised(self, step: Step) -> tuple[float, int]:
        """(tokens expected of these rows, nodes of the whole step) by free guesses."""
        choice = choose_nodes([step.offer(self.max_nodes)], step.num_others, step.cost)
        guesses = sum(choice.counts[0])
        return choice.tokens - step.num_others, step.num_rows + guesses

    def take(self, counts: Sequence[int]) -> Draft:
        if self._resting is not None:
            return root_draft(self._resting, self.device)
        step = self._step
        assert step is not None, "nothing was offered"
        step.keep(counts)
        draft = draft_of(step.tries, self.device)
        step.drafted = self.clock()
        return draft

    def observe(self, step: StepResult) -> None:
        self._end = self.clock()
        if self._resting is not None:
            self.credits = []
            self._share(PLAIN).count(len(self._resting), 0)
            return
        did = self._step
        assert did is not None
        self._record(did, step)
        learn(self.experience.acceptance, did.tries, step)
        self.credits = credited(did.tries, step)
        for source in self._sources:
            source.observe(step)
        for trie, path in zip(did.tries, step.paths, strict=True):
            self._share(sources_of(trie)).count(1, len(path))

    def _record(self, did: Step, step: StepResult) -> None:
        """What the step took and what asking has gained."""
        experience = self.experience
        if did.timed_here:
            nodes = len(did.tries) * step.draft.tokens_BN.shape[1]
            did.cost.record(nodes, self._end - did.drafted)
        if did.chooser is None:
            return
        if not did.timed_here:
            accepted = sum(len(path) for path in step.paths)
            asking = experience.asking(did.num_rows, did.cost)
            steps = asking.record(did.gained(accepted), did.num_guesses > 0)
            self._rest = 0 if did.choice or did.chooser.pays() else steps
        if did.choice and did.choice not in experience.asked:
            experience.asked.add(did.choice)  # it has warmed up
            return
        gained = 0.0
        if did.choice:
            did.asking = did.chooser.took(did.choice, did.asking)
            gained = did.gained_by_asking()
        did.chooser.record(did.situation, did.choice, gained)

    def _share(self, how: str) -> Share:
        return self.shares.setdefault(how, Share())

    def finish(self, requests: Sequence[RequestText]) -> None:
        for source in self._sources:
            source.finish(requests)


def build(context: DraftContext, options: Any) -> Drafter:
    """Heads where there are any, the draft model where one is named, and free sources."""
    names, reasons = usual_sources(context, options.sources)
    given = {**free_sizes(options.max_nodes), **options.options}
    sources = build_sources(context, names, given)
    free = [source for source in sources if source.name not in COSTLY]
    costly = [source for source in sources if source.name in COSTLY]
    key = ("auto", tuple(names))
    experience = context.remembered(key, lambda: _fresh(context, costly))
    drafter = AutoDrafter(free, costly, experience, context.device, options.max_nodes, reasons)
    drafter.chains = context.verifier.chains_only
    return drafter


def free_sizes(max_nodes: int) -> dict[str, dict[str, Any]]:
    """How much free sources guess; guesses not worth verifying are dropped afterwards."""
    return {
        "suffix": {"num_nodes": max_nodes},
        "prompt-lookup": {"num_tokens": max_nodes - 1},
        "recycling": {"num_nodes": min(max_nodes, 6)},
    }


def _fresh(context: DraftContext, costly: Sequence[TrieDrafter]) -> Experience:
    hopes = [0.0, *(HOPES[source.name] for source in costly)]
    cost = StepCost(SLOPES.get(context.device.type, SLOPES["cuda"]))
    calibrated = {
        choice: sorted(context.acceptance, reverse=True)
        for choice, source in enumerate(costly, start=1)
        if source.name == "medusa" and context.acceptance is not None
    }
    return Experience(shared_estimate(context), cost, hopes, calibrated)
