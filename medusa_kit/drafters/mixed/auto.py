"""The drafting policy: which sources to ask at a step, and how many draft tokens to verify.

Each source says how likely its draft tokens are, and the batch verifies as many of the likeliest as
bring the most tokens a second (infer/decode/node_choice/), which may be none. Asking takes time
too, so what it gains is learned (explorer.py): first of the sources that read text, together, then
of one that runs a model, such as heads, by how much the text has promised. `auto` has all sources;
a drafter that is named has one.

A gain is the difference between two expectations for one and the same step, with the source's draft
tokens and without: tokens of single steps differ by more than a source gains in hundreds of them.
Its time is what drafting takes, and, of a source that runs a model, what the base model takes
beyond t(n), with the source and without.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.mixed.explorer import Explorer, Overheads
from medusa_kit.drafters.mixed.shares import SourceUsage, percentages, sources_of, tokens_a_step
from medusa_kit.drafters.mixed.sources import (
    build_sources,
    credited,
    merged,
    shared_estimate,
    together,
    usual_sources,
)
from medusa_kit.drafters.tree_drafter import TreeDrafter, learn
from medusa_kit.infer.decode.drafter import Candidates, Drafter, RequestText, State, StepResult
from medusa_kit.infer.decode.node_choice.choice import choose_nodes
from medusa_kit.infer.decode.node_choice.cost import StepCost
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.infer.forest import Forest
from medusa_kit.locks import SharedLock
from medusa_kit.settings.drafters import SOURCES
from medusa_kit.tree.draft_tree import DraftTree

PRIOR_GAIN = 0.5  # tokens a step that a source is assumed to gain at first, if it drafts alone
FAVOUR = 0.01  # tokens a step that reading text may lose: any text may begin to repeat itself
STEPS = 3  # situations in which the tokens promised differ by less than a factor of two


@dataclass
class PolicyStats:
    """What all requests of an engine have seen of these sources."""

    acceptance: AcceptanceEstimate
    overheads: Overheads = field(default_factory=Overheads)
    _explorers: dict[tuple[int, ...], Explorer] = field(default_factory=dict)
    _lock: SharedLock = field(default_factory=SharedLock, repr=False, compare=False)

    def explorer(
        self,
        situation: tuple[int, ...],
        prior_gains: Callable[[], list[float]],
        favour: float = 0.0,
    ) -> Explorer:
        """The one for this situation. `prior_gains`, `favour`: of a new one."""
        with self._lock:
            if situation not in self._explorers:
                self._explorers[situation] = Explorer(prior_gains(), favour)
            return self._explorers[situation]

    def new_text(self) -> None:
        with self._lock:
            explorers = list(self._explorers.values())
        for explorer in explorers:
            explorer.new_text()


class Step(Candidates):
    """What is drafted in a step, and what that promises. `about`: the number of requests in it, to
    a factor of two: what gains for one does not gain for many."""

    def __init__(
        self, drafter: "AutoDrafter", cost: StepCost, num_others: int, num_own: int
    ) -> None:
        self.drafter, self.cost = drafter, cost
        self.num_others, self.num_own = num_others, num_own
        self.num_rows = num_others + num_own
        self.about = self.num_rows.bit_length()
        self.min_chance = cost.least_chance(self.num_rows)  # of a draft token that gains
        self.next_chance = cost.least_chance(self.num_rows, num_own)  # of one beside another one
        self.plain = cost.seconds(self.num_rows)
        self.trees: list[DraftTree] = []
        self.orders: list[list[tuple[int, float]]] = []  # each request's nodes with their chances
        self.text: Explorer | None = None  # by which sources that read text were asked
        self.computed: Explorer | None = None  # by which a source that runs a model was
        self.asked_text = self.choice = 0
        # Expected of the own requests by text alone, in so many seconds; by what is verified.
        self.promised, self.seconds = float(num_own), self.plain
        self.expected, self.num_guesses = float(num_own), 0

    @property
    def kind(self) -> tuple[int, int, int]:
        return self.about, self.asked_text, self.choice

    @property
    def prior_gain(self) -> float:
        """What any source is assumed to gain: less where draft tokens are expensive, or where much
        is promised already."""
        return PRIOR_GAIN * max(1 - self.min_chance, 0.0) * (self.num_own / self.promised) ** 2

    def add(self, trees: Sequence[DraftTree]) -> None:
        """More draft tokens."""
        self.trees = together(self.trees, trees) if self.trees else list(trees)
        self.orders = [likeliest(one, self.drafter.chains) for one in self.trees]

    @property
    def chances(self) -> list[list[float]]:
        max_nodes = self.drafter.num_nodes
        return [[chance for _, chance in order[1:max_nodes]] for order in self.orders]

    def promise(self) -> None:
        """What is drafted so far is what text promises."""
        chosen = choose_nodes(self.chances, self.num_others, self.cost)
        self.promised, self.seconds = chosen.tokens - self.num_others, chosen.seconds

    def select(self, counts: Sequence[int]) -> "Drafted":
        pairs = list(zip(self.orders, counts, strict=True))
        self.trees = [
            tree.kept([node for node, _ in order[: 1 + count]])
            for tree, (order, count) in zip(self.trees, pairs, strict=True)
        ]
        self.num_guesses = sum(tree.num_nodes - 1 for tree in self.trees)
        right = (chance for order, count in pairs for _, chance in order[1 : 1 + count])
        self.expected = self.num_own + sum(right)
        return drafted(self.trees, self.drafter.device, self)

    def longer(self, timing: StepTiming) -> float:
        """By how many seconds the base model took longer for these nodes than usual."""
        return timing.verifying - self.cost.seconds(self.num_rows + self.num_guesses)

    def gain_of_text(self, overheads: Overheads) -> float:
        """A request's tokens that text adds to a plain step, less those of the time it takes."""
        more = overheads.drafting((self.about, 1, 0)) - overheads.drafting((self.about, 0, 0))
        rate = self.num_rows / self.plain
        tokens = self.promised - self.num_own
        return (tokens - (self.seconds + more - self.plain) * rate) / self.num_own

    def gain_of_choice(self, overheads: Overheads) -> float:
        """Net gain per request of the source that runs a model, on top of the text sources."""
        more = overheads.more(self.kind, (self.about, self.asked_text, 0))
        rate = (self.num_others + self.promised) / self.seconds
        seconds = self.cost.seconds(self.num_rows + self.num_guesses) + more
        tokens = self.expected - self.promised
        return (tokens - (seconds - self.seconds) * rate) / self.num_own


@dataclass(frozen=True)
class Drafted(Forest):
    """A draft with what its drafter learns by. `step`: None where nothing was chosen."""

    trees: Sequence[DraftTree]
    step: Step | None


def drafted(trees: Sequence[DraftTree], device: torch.device, step: Step | None = None) -> Drafted:
    draft = Forest.of_drafts(trees, device)
    return Drafted(draft.tokens_N, draft.shapes, trees, step)


def likeliest(tree: DraftTree, chains: bool) -> list[tuple[int, float]]:
    """Its nodes with their chances, the root first and likeliest first; of a chain if need be."""
    return tree.best_path() if chains else tree.by_chance()


class AutoDrafter(Drafter):
    """Asks its sources where that gains."""

    has_candidates = True

    def __init__(
        self,
        name: str,
        sources: Sequence[TreeDrafter],
        stats: PolicyStats,
        max_nodes: int,
        device: torch.device,
        chains: bool = False,
        reasons: Sequence[str] = (),
    ) -> None:
        """`chains`: whether a request's draft tokens must follow one another. `reasons`: why
        expected sources are missing."""
        self.name, self.sources, self.stats = name, sources, stats
        self.texts = [source for source in sources if not source.runs_model]
        self.computing = [source for source in sources if source.runs_model]
        self.num_nodes, self.device, self.chains = max_nodes, device, chains
        self.reasons = reasons
        self.num_ranks = max((source.num_ranks for source in sources), default=0)
        self.reads_prompts = any(source.reads_prompts for source in sources)
        self.watches = tuple(layer for source in sources for layer in source.watches)
        self.shares: dict[str, SourceUsage] = {}

    def describe(self) -> str:
        """Its name, and how often each source drafted."""
        return f"{self.name} ({percentages(self.shares)})" if self.shares else self.name

    @property
    def notes(self) -> list[str]:
        sources = [note for source in self.sources for note in source.notes]
        return [*self.reasons, *tokens_a_step(self.shares), *sources]

    def begin(self, request: RequestText) -> None:
        self.stats.new_text()
        for source in self.sources:
            source.begin(request)

    def propose(self, state: State) -> Drafted:
        """The likeliest draft tokens of all sources, as many as there may be."""
        trees = merged(self.sources, state, self.stats.acceptance)
        orders = [likeliest(tree, self.chains)[: self.num_nodes] for tree in trees]
        kept = [
            tree.kept([node for node, _ in order])
            for tree, order in zip(trees, orders, strict=True)
        ]
        return drafted(kept, self.device)

    def candidates(self, state: State, cost: StepCost, num_others: int) -> Step:
        step = Step(self, cost, num_others, len(state.roots_B))
        self._ask_texts(step, state)
        if self.computing:
            self._ask_computing(step, state)
        return step

    def _ask_texts(self, step: Step, state: State) -> None:
        if self.texts:
            step.text = self.stats.explorer((step.about,), lambda: [step.prior_gain], FAVOUR)
            step.asked_text = step.text.choose()
        asked = self.texts if step.asked_text else []
        step.add(self._guesses(step, asked, state))
        step.promise()

    def _ask_computing(self, step: Step, state: State) -> None:
        promised = int(STEPS * math.log2(step.promised / step.num_own))
        situation = step.about, step.asked_text, promised
        numbered = list(enumerate(self.computing, start=1))
        step.computed = self.stats.explorer(
            situation,
            lambda: [self._prior_gain(source, step, choice) for choice, source in numbered],
        )
        for choice, source in numbered:
            if source.is_foreseen:
                step.computed.expect(choice, self._prior_gain(source, step, choice))
        step.choice = step.computed.choose()
        if step.choice:
            step.add(self._guesses(step, [self.computing[step.choice - 1]], state))

    def _guesses(self, step: Step, sources: Sequence[TreeDrafter], state: State) -> list[DraftTree]:
        for source in sources:
            source.set_min_chance(step.min_chance, self.stats.acceptance, step.next_chance)
        return merged(sources, state, self.stats.acceptance)

    def _prior_gain(self, source: TreeDrafter, step: Step, choice: int) -> float:
        """What a source gains before it was asked here, as far as that is known."""
        acceptance, overheads = self.stats.acceptance, self.stats.overheads
        if (expected := source.expected(acceptance)) is None:
            return step.prior_gain
        share = (step.num_own / step.promised) ** 2  # it adds less where more is promised
        own = sorted((share * chance for chance in expected), reverse=True)
        both = [sorted([*own, *known], reverse=True) for known in step.chances]
        chosen = choose_nodes(both, step.num_others, step.cost)
        rate = (step.num_others + step.promised) / step.seconds
        tokens = chosen.tokens - step.num_others - step.promised
        kind = step.about, step.asked_text, choice
        more = chosen.seconds - step.seconds + overheads.more(kind, (*kind[:2], 0))
        return (tokens - more * rate) / step.num_own

    def observe(self, result: StepResult) -> None:
        draft = result.draft
        assert isinstance(draft, Drafted), "another drafter's draft"
        if draft.step is not None and result.timing is not None:
            self._learn(draft.step, result.timing)
        learn(self.stats.acceptance, draft.trees, result)
        for request, credit in zip(result.requests, credited(draft.trees, result), strict=True):
            request.credits = credit
        for source in self.sources:
            source.observe(result)
        pairs = zip(draft.trees, result.paths, strict=True)
        for request, (tree, path) in zip(result.requests, pairs, strict=True):
            request.drafted_by = sources_of(tree)
            self.shares.setdefault(request.drafted_by, SourceUsage()).count(1, len(path))

    def _learn(self, step: Step, timing: StepTiming) -> None:
        """What the step took, and what asking has gained."""
        overheads = self.stats.overheads
        overheads.record(step.kind, timing.drafting, step.longer(timing), step.plain)
        if step.text is not None:
            step.text.record(step.asked_text, step.gain_of_text(overheads))
        if step.computed is not None:
            step.computed.record(step.choice, step.gain_of_choice(overheads))

    def finish(self, requests: Sequence[RequestText]) -> None:
        for source in self.sources:
            source.finish(requests)


def build(context: DraftContext, options: Any) -> Drafter:
    """Heads where there are any, the draft model where one is named, and what reads text."""
    names, reasons = usual_sources(context, options.sources)
    sizes = text_sizes(options.max_nodes)
    given = {name: {**sizes.get(name, {}), **options.options.get(name, {})} for name in names}
    return _auto("auto", names, build_sources(context, names, given), context,
                 options.max_nodes, reasons)  # fmt: skip


def chosen(name: str, context: DraftContext, options: Mapping[str, Any] | None) -> Drafter:
    """The drafter of this name, whose draft tokens are verified as far as they gain where the
    engine asks for that. Raises as `build_drafter`."""
    drafter = build_drafter(name, context, options)
    if not (context.paying and isinstance(drafter, TreeDrafter) and name in SOURCES):
        return drafter
    return _auto(drafter.describe(), [name], [drafter], context, drafter.num_nodes, ())


def text_sizes(max_nodes: int) -> dict[str, dict[str, Any]]:
    """How much sources that read text draft; what is not worth verifying is dropped afterwards."""
    return {
        "suffix": {"num_nodes": max_nodes},
        "prompt-lookup": {"num_tokens": max_nodes - 1},
        "recycling": {"num_nodes": min(max_nodes, 6)},
    }


def _auto(
    name: str,
    names: Sequence[str],
    sources: Sequence[TreeDrafter],
    context: DraftContext,
    max_nodes: int,
    reasons: Sequence[str],
) -> AutoDrafter:
    acceptance = shared_estimate(context)
    key = ("what asking has gained", *names, context.tree, context.sampling.temperature)
    stats = context.remembered(key, lambda: PolicyStats(acceptance))
    chains = context.verifier.chains_only
    return AutoDrafter(name, sources, stats, max_nodes, context.device, chains, reasons)
