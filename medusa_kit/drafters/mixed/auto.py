"""Chooses at each position what pays: which sources to ask and how many nodes to verify, if any.

Free sources (text and tables) are asked at every step. How many of the merged guesses are verified
follows from their chances and from what a node costs on this machine, measured while decoding.
Heads and draft models cost time: `Chooser` learns where they pay.

Where whole steps run on the device (infer/cuda_graph/), guesses are sent to them. The heads then
draft within every step, and a step has one of a few sizes and is filled with guesses.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.heads.hydra import HydraDrafter
from medusa_kit.drafters.heads.medusa import MedusaDrafter
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.drafters.mixed.chooser import Chooser
from medusa_kit.drafters.mixed.combined import (
    build_sources,
    credited,
    merged,
    shared_estimate,
    usual_sources,
)
from medusa_kit.drafters.mixed.experience import Experience
from medusa_kit.drafters.mixed.shares import PLAIN, Share, percentages, sources_of, tokens_a_step
from medusa_kit.drafters.text.recycling import RecyclingDrafter
from medusa_kit.drafters.trie import Source, Trie, draft_of, learn
from medusa_kit.infer.accept.token_choice import TokenChooser
from medusa_kit.infer.cuda_graph.host_trees import MOST_NODES, HostTreeSpec
from medusa_kit.infer.draft import (
    Draft,
    Drafter,
    State,
    StepResult,
    notes_of,
    root_draft,
    tell_end,
)
from medusa_kit.infer.node_choice.choice import Offer, choose_nodes
from medusa_kit.infer.node_choice.cost import StepCost

COSTLY = ("medusa", "draft-model")
SLOPES = {"cpu": 0.12, "cuda": 0.01}  # cost of one more node in one-node steps, until measured
SIZES = (1, 4, 8, 16, 32)  # nodes of steps on the device, each captured separately
ASKING = 0.15  # of a plain step: what heads are assumed to take before they are first asked
HOPES = {"medusa": 0.5, "draft-model": 1.0}  # tokens a step that a costly source adds, at first


@dataclass
class _Step:
    """What was guessed in the current step, and then what of it was taken."""

    tries: list[Trie]
    orders: list["Order"]  # by chance
    situation: int | None  # None: no source was chosen, since nothing has been measured
    choice: int
    start: float
    num_others: int = 0  # nodes of other rows in the same step
    drafted: float = 0.0
    chooser: Chooser | None = None
    promised: float = 0.0  # tokens of these rows with free guesses alone
    seconds: float = 0.0  # of that step
    rate: float = 0.0  # tokens a second of all rows by such steps, and what lies between them
    asking: float = 0.0  # seconds that the costly source took
    num_guesses: int = 0  # verified
    expected: float = 0.0  # right ones of these
    cost: StepCost | None = None  # of the batch, where that has taken the guesses
    own_cost: StepCost | None = None  # where the step's time is to be recorded here

    def offer(self, max_nodes: int) -> Offer:
        return Offer([[chance for _, chance in order[1:max_nodes]] for order in self.orders])

    def gained_by_asking(self, cost: StepCost) -> float:
        """Tokens of a row that a costly source should add, less those of the time that it took."""
        B = len(self.tries)
        longer = cost.seconds(self.num_others + B + self.num_guesses) - self.seconds + self.asking
        return (B + self.expected - self.promised - longer * self.rate) / B

    def gained(self, accepted: int, cost: StepCost) -> float:
        """Plain steps gained by the guesses, of which so many were right."""
        plain_nodes = self.num_others + len(self.tries)
        plain = cost.seconds(plain_nodes)
        longer = cost.seconds(plain_nodes + self.num_guesses) - plain
        return accepted / plain_nodes - (longer + self.drafted - self.start) / plain


@dataclass
class AutoDrafter:
    """Asks `free` sources at every step and one of `costly` where it pays. `clock`: in seconds."""

    free: Sequence[Source]
    costly: Sequence[Source]
    experience: Experience
    device: Any
    max_nodes: int
    reasons: Sequence[str] = ()
    # What it requires of steps on the device; None: it cannot use them.
    host_trees: HostTreeSpec | None = None
    device_experience: Experience | None = None  # of such steps, with costs of their own
    clock: Callable[[], float] = time.perf_counter
    shares: dict[str, Share] = field(default_factory=dict)
    credits: list[list[str]] = field(default_factory=list)
    _step: _Step | None = None
    _on_device: bool = False
    _end: float = 0.0  # of the last step; 0: there was none, or rows have joined since
    _rest: int = 0  # steps until sources are asked again
    _resting: Sequence[int] | None = None  # the rows' roots, where nobody is asked in this step
    _elsewhere: Any = None  # what is used of the above where steps do not run on the device

    @property
    def num_nodes(self) -> int:
        return max(self.max_nodes, 0 if self.host_trees is None else self.host_trees.num_nodes)

    def use_host_trees(self, whether: bool) -> None:
        """Whether, from now on, the state holds the heads' guesses, and trees are read on the host.
        No row is there."""
        if self._elsewhere is None:
            self._elsewhere = self.free, self.costly, self.experience, self.max_nodes, self.device
        self.free, self.costly, self.experience, self.max_nodes, self.device = self._elsewhere
        self._on_device = whether
        if not whether:
            return
        assert self.host_trees is not None
        assert self.device_experience is not None
        self.free, self.costly = [*self.free, *self.costly], []
        self.experience, self.max_nodes = self.device_experience, self.host_trees.num_nodes
        self.device = torch.device("cpu")

    def _nodes(self, wanted: int) -> int:
        """The number of nodes that is verified where `wanted` are wanted."""
        if not self._on_device or self.host_trees is None:
            return wanted
        return self.host_trees.fitting(wanted)

    @property
    def name(self) -> str:
        """`auto`, and how often each source drafted."""
        return f"auto ({percentages(self.shares)})" if self.shares else "auto"

    @property
    def notes(self) -> list[str]:
        sources = [note for source in (*self.free, *self.costly) for note in notes_of(source)]
        return [*self.reasons, *self._how(), *tokens_a_step(self.shares), *sources]

    def _how(self) -> list[str]:
        if self.host_trees is None:
            return []
        if not self._on_device:
            return ["guesses are not sent to steps on the device: none were available"]
        return [f"guesses sent to steps of {', '.join(map(str, self.host_trees.sizes))} nodes"]

    def join(self, state: State) -> None:
        self.experience.new_text()
        self._end = 0.0
        for source in (*self.free, *self.costly):
            source.join(state)

    def propose(self, state: State) -> Draft:
        """Its own choice of guesses: equally many for each row, by what it has measured itself."""
        cost, self._resting = self.experience.cost, None
        step = self._guess(state, cost, 0)
        size, _ = best_size(step.orders, cost, self.max_nodes, self._nodes)
        size = self._nodes(size)  # nodes that are verified anyway hold guesses too
        draft = self.take([size - 1] * len(state.roots_B))
        step.own_cost = cost
        return draft

    def offer(self, state: State, cost: StepCost, num_others: int) -> Offer:
        """The likeliest guesses; none while asking for them does not pay."""
        forced = any(chooser.mask is not None for chooser in state.choosers)
        if self._rest > 0 and not forced:  # what a grammar forces costs nothing to name
            self._rest, self._resting = self._rest - 1, state.roots_B
            self.experience.chooser(num_others + len(state.roots_B), cost).rested()
            return Offer([[] for _ in state.roots_B])
        self._resting = None
        step = self._guess(state, cost, num_others)
        step.cost = cost
        return step.offer(self.max_nodes)

    def _guess(self, state: State, cost: StepCost, num_others: int) -> "_Step":
        """Ask the free sources, and a costly one where that should pay."""
        start, B = self.clock(), len(state.roots_B)
        acceptance, rows = self.experience.acceptance, num_others + B
        if cost.measured:
            for source in self.free:
                source.leave_out_below(cost.least_chance(rows), acceptance)
        tries = merged(self.free, state, acceptance)
        self._step = step = _Step(tries, [trie.by_chance() for trie in tries], None, 0, start)
        step.num_others = num_others
        if not cost.measured:
            return step
        step.promised, num_nodes = self._promised(step, cost)
        step.seconds = cost.seconds(num_nodes)
        between = self.experience.between(self.clock() - self._end if self._end else 0.0)
        step.rate = (num_others + step.promised) / (step.seconds + between)
        step.chooser = self.experience.chooser(rows, cost)
        step.situation, step.choice = step.chooser.choose(
            step.promised / B, lambda choice: self._expected(choice, step, cost)
        )
        if step.choice:
            self._ask(self.costly[step.choice - 1], step, state, cost.least_chance(rows))
        return step

    def _ask(self, source: Source, step: "_Step", state: State, least_chance: float) -> None:
        """Add the guesses of a costly source."""
        start, acceptance = self.clock(), self.experience.acceptance
        source.leave_out_below(least_chance, acceptance)
        for whole, more in zip(step.tries, merged([source], state, acceptance), strict=True):
            whole.merge(more)
        step.orders = [trie.by_chance() for trie in step.tries]
        step.asking = self.clock() - start

    def _expected(self, choice: int, step: "_Step", cost: StepCost) -> float | None:
        """What a row's step gains by this choice; None where it was not calibrated. Its guesses
        add less where free ones promise more."""
        calibrated = self.experience.calibrated.get(choice)
        if calibrated is None:
            return None
        B, others = len(step.tries), step.num_others
        more = [chance / (step.promised / B) ** 2 for chance in calibrated]
        free = step.offer(self.max_nodes).chances
        offer = Offer([sorted([*own, *more], reverse=True) for own in free])
        chosen = choose_nodes([offer], others, cost)
        longer = chosen.seconds - step.seconds + ASKING * cost.seconds(others + B)
        return (chosen.tokens - others - step.promised - longer * step.rate) / B

    def _promised(self, step: "_Step", cost: StepCost) -> tuple[float, int]:
        """(tokens expected of these rows, nodes of the whole step) by free guesses."""
        B = len(step.tries)
        if self._on_device:
            size, promised = best_size(step.orders, cost, self.max_nodes, self._nodes)
            return promised, B * self._nodes(size)
        choice = choose_nodes([step.offer(self.max_nodes)], step.num_others, cost)
        guesses = sum(choice.counts[0])
        return choice.tokens - step.num_others, step.num_others + B + guesses

    def take(self, counts: Sequence[int]) -> Draft:
        if self._resting is not None:
            return root_draft(self._resting, self.device)
        step = self._step
        assert step is not None, "nothing was offered"
        step.tries = [
            trie.kept([node for node, _ in order[: 1 + count]])
            for trie, order, count in zip(step.tries, step.orders, counts, strict=True)
        ]
        step.num_guesses = sum(trie.num_nodes - 1 for trie in step.tries)
        step.expected = sum(
            chance
            for order, trie in zip(step.orders, step.tries, strict=True)
            for _, chance in order[1 : trie.num_nodes]
        )
        draft = draft_of(step.tries, self.device)
        step.drafted = self.clock()
        return draft

    def observe(self, step: StepResult) -> None:
        self._end = self.clock()
        if self._resting is not None:
            self.credits = []
            self._share(PLAIN).count(len(self._resting), 0)
            return
        now, did = self._end, self._step
        assert did is not None
        experience, B = self.experience, len(did.tries)
        accepted = sum(len(path) for path in step.paths)
        if did.cost is not None and did.situation is not None:
            rest = experience.asking(did.num_others + B, did.cost)
            steps = rest.record(did.gained(accepted, did.cost), did.num_guesses > 0)
            assert did.chooser is not None
            self._rest = 0 if did.chooser.pays() else steps
        num_nodes = self._nodes(step.draft.tokens_BN.shape[1])
        if did.own_cost is not None:
            did.own_cost.record(B * num_nodes, now - did.drafted)
        if did.choice and did.choice not in experience.asked:
            experience.asked.add(did.choice)
        elif did.chooser is not None and did.situation is not None:
            cost = did.own_cost or did.cost
            assert cost is not None
            gained = did.gained_by_asking(cost) if did.choice else 0.0
            did.chooser.record(did.situation, did.choice, gained)
        learn(experience.acceptance, did.tries, step)
        self.credits = credited(did.tries, step)
        for source in (*self.free, *self.costly):
            source.observe(step)
        for trie, path in zip(did.tries, step.paths, strict=True):
            self._share(sources_of(trie)).count(1, len(path))

    def _share(self, how: str) -> Share:
        return self.shares.setdefault(how, Share())

    def select_rows(self, rows: Sequence[int]) -> None:
        for source in (*self.free, *self.costly):
            source.select_rows(rows)

    def end(self, answers: Sequence[Sequence[int]]) -> None:
        for source in (*self.free, *self.costly):
            tell_end(source, answers)


Order = Sequence[tuple[int, float]]  # a row's nodes with their chances, likeliest first


def best_size(
    orders: Sequence[Order],
    cost: StepCost,
    max_nodes: int,
    verified: Callable[[int], int] = lambda wanted: wanted,
) -> tuple[int, float]:
    """(nodes for each row, tokens expected over all rows) with the most tokens a second.

    `verified`: from the wanted number of nodes to the step's.
    """
    B = len(orders)
    gains = [0.0] * max_nodes  # of the n-th likeliest node, over the rows
    for order in orders:
        for place, (_, chance) in enumerate(order[:max_nodes]):
            gains[place] += chance
    best, tokens, promised = 1, float(B), float(B)
    rate = tokens / cost.seconds(B * verified(1))
    for size in range(2, max_nodes + 1):
        if gains[size - 1] == 0.0:
            break
        tokens += gains[size - 1]
        seconds = cost.seconds(B * verified(size))
        if tokens / seconds > rate:
            best, promised, rate = size, tokens, tokens / seconds
    return best, promised


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
    if context.on_device:
        if (why := _obstacle(context, free, costly)) is not None:
            drafter.reasons = [*reasons, f"guesses are not sent to steps on the device: {why}"]
            return drafter
        drafter.host_trees = _host_trees(options, free, costly, context.base.info.vocab_size)
        sizes = drafter.host_trees.sizes
        key_there = ("auto, on device", tuple(names), context.batch_size, sizes)
        drafter.device_experience = context.remembered(key_there, lambda: _fresh(context, []))
    return drafter


def _obstacle(
    context: DraftContext, free: Sequence[Source], costly: Sequence[Source]
) -> str | None:
    """Why guesses of these sources cannot be sent to steps on the device; None where they can."""
    if any(source.name == "draft-model" for source in (*free, *costly)):
        return "a draft model is among the sources, which runs outside of them"
    chooser = TokenChooser(context.base, context.sampling, [0], 1)
    if not chooser.takes_argmax:
        return "tokens are sampled or logits processed, which is done on the host"
    for source in costly:
        if type(getattr(source, "inner", None)) not in (MedusaDrafter, HydraDrafter):
            return "the heads' tree is grown anew at each step"
    return None


def _host_trees(
    options: Any, free: Sequence[Source], costly: Sequence[Source], vocab_size: int
) -> HostTreeSpec:
    """With as many nodes as the heads' tree has, unless options give a number."""
    heads = next((cast(HeadsSource, source).inner for source in costly), None)
    most = options.max_nodes
    if heads is not None and "max_nodes" not in options.model_fields_set:
        most = max(most, heads.num_nodes)
    most = min(most, MOST_NODES)
    widths = [s.options.width for s in free if isinstance(s, RecyclingDrafter)]
    ranks = min(max(widths, default=0), vocab_size)
    return HostTreeSpec((*(size for size in SIZES if size < most), most), ranks, heads)


def free_sizes(max_nodes: int) -> dict[str, dict[str, Any]]:
    """How much free sources guess; guesses not worth verifying are dropped afterwards."""
    return {
        "suffix": {"num_nodes": max_nodes},
        "prompt-lookup": {"num_tokens": max_nodes - 1},
        "recycling": {"num_nodes": min(max_nodes, 6)},
    }


def _fresh(context: DraftContext, costly: Sequence[Source]) -> Experience:
    hopes = [0.0, *(HOPES[source.name] for source in costly)]
    cost = StepCost(SLOPES.get(context.device.type, SLOPES["cuda"]))
    calibrated = {
        choice: sorted(context.acceptance, reverse=True)
        for choice, source in enumerate(costly, start=1)
        if source.name == "medusa" and context.acceptance is not None
    }
    return Experience(shared_estimate(context), cost, hopes, calibrated)
