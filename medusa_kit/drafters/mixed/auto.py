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
from medusa_kit.drafters.mixed.bandit import Chooser
from medusa_kit.drafters.mixed.combined import (
    HeadsSource,
    build_sources,
    credited,
    learn,
    merged,
    shared_estimate,
    source_of,
    usual_sources,
)
from medusa_kit.drafters.mixed.estimates import AcceptanceEstimate, StepCost
from medusa_kit.drafters.text.recycling import RecyclingDrafter
from medusa_kit.drafters.trie import Source, Trie, draft_of
from medusa_kit.infer.accept.token_choice import TokenChooser
from medusa_kit.infer.cuda_graph.host_trees import MOST_NODES, HostTreeSpec
from medusa_kit.infer.draft import COUNTS, Draft, Drafter, State, StepResult, notes_of, tell_end

COSTLY = ("medusa", "draft-model")
PLAIN = "none"  # a step in which nothing was guessed
MOST_TOLD = 3  # mixes of sources that notes name
SLOPES = {"cpu": 0.12, "cuda": 0.01}  # cost of one more node in one-node steps, until measured
SIZES = (1, 4, 8, 16, 32)  # nodes of steps on the device, each captured separately
HOPES = {"medusa": 0.5, "draft-model": 1.0}  # tokens a step that a costly source adds, at first


@dataclass
class Experience:
    """The measurements of all requests of an engine with one batch size."""

    acceptance: AcceptanceEstimate
    cost: StepCost
    chooser: Chooser


@dataclass
class _Step:
    """What was proposed in the current step."""

    tries: list[Trie]
    situation: int | None  # None: the very first step, which only measures
    choice: int
    start: float
    drafted: float = 0.0


@dataclass
class Share:
    """What a mix of sources came to."""

    steps: int = 0
    tokens: int = 0

    def told(self, how: str) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{self.tokens / self.steps:.2f} {how} ({steps})"


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
        steps = sum(share.steps for share in self.shares.values())
        ranked = sorted(self.shares.items(), key=lambda item: -item[1].steps)
        parts = [f"{name} {share.steps / steps:.0%}" for name, share in ranked]
        return f"auto ({', '.join(parts)})" if parts else "auto"

    @property
    def notes(self) -> list[str]:
        sources = [note for source in (*self.free, *self.costly) for note in notes_of(source)]
        return [*self.reasons, *self._how(), *self._counts(), *sources]

    def _counts(self) -> list[str]:
        """One line on what mixes of sources came to, the usual ones by name."""
        if not self.shares.keys() - {PLAIN}:
            return []
        ranked = sorted(self.shares.items(), key=lambda item: -item[1].steps)
        said = [
            share.told("without a guess" if name == PLAIN else f"with {name}")
            for name, share in ranked[:MOST_TOLD]
        ]
        if rest := [share for _, share in ranked[MOST_TOLD:]]:
            others = Share(sum(s.steps for s in rest), sum(s.tokens for s in rest))
            said.append(others.told("otherwise"))
        return [COUNTS + ", ".join(said)]

    def _how(self) -> list[str]:
        if self.host_trees is None:
            return []
        if not self._on_device:
            return ["guesses are not sent to steps on the device: none were available"]
        return [f"guesses sent to steps of {', '.join(map(str, self.host_trees.sizes))} nodes"]

    def join(self, state: State) -> None:
        for source in (*self.free, *self.costly):
            source.join(state)

    def propose(self, state: State) -> Draft:
        start, B = self.clock(), len(state.roots_B)
        acceptance, cost = self.experience.acceptance, self.experience.cost
        tries = merged(self.free, state, acceptance)
        orders = [trie.by_chance() for trie in tries]
        size, promised = best_size(orders, cost, self.max_nodes, self._nodes)
        situation, choice = None, 0
        if cost.measured:
            step_seconds = cost.seconds(B * self._nodes(size)) / B
            situation, choice = self.experience.chooser.choose(promised / B, step_seconds)
        if choice:
            for whole, more in zip(
                tries, merged([self.costly[choice - 1]], state, acceptance), strict=True
            ):
                whole.merge(more)
            orders = [trie.by_chance() for trie in tries]
            size, _ = best_size(orders, cost, self.max_nodes, self._nodes)
        size = self._nodes(size)  # nodes that are verified anyway hold guesses too
        tries = [
            trie.kept([node for node, _ in order[:size]])
            for trie, order in zip(tries, orders, strict=True)
        ]
        self._step = _Step(tries, situation, choice, start)
        draft = draft_of(tries, self.device)
        self._step.drafted = self.clock()
        return draft

    def observe(self, step: StepResult) -> None:
        now, did = self.clock(), self._step
        assert did is not None
        experience, B = self.experience, len(did.tries)
        emitted = B + sum(len(path) for path in step.paths)
        num_nodes = self._nodes(step.draft.tokens_BN.shape[1])
        experience.cost.record(B * num_nodes, now - did.drafted)
        if did.situation is not None:
            seconds = (now - did.start) / B
            experience.chooser.record(did.situation, did.choice, emitted / B, seconds)
        learn(experience.acceptance, did.tries, step)
        self.credits = credited(did.tries, step)
        for source in (*self.free, *self.costly):
            source.observe(step)
        for trie, path in zip(did.tries, step.paths, strict=True):
            share = self.shares.setdefault(_sources_of(trie), Share())
            share.steps += 1
            share.tokens += 1 + len(path)

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


def _sources_of(trie: Trie) -> str:
    """The sources of a tree's guesses; PLAIN where it is the root alone."""
    return " + ".join(sorted({source_of(key) for key in trie.keys[1:]})) or PLAIN


def build(context: DraftContext, options: Any) -> Drafter:
    """Heads where there are any, the draft model where one is named, and free sources."""
    names, reasons = usual_sources(context, options.sources)
    given = {**free_sizes(options.max_nodes), **options.options}
    sources = build_sources(context, names, given)
    free = [source for source in sources if source.name not in COSTLY]
    costly = [source for source in sources if source.name in COSTLY]
    key = ("auto", tuple(names), context.batch_size)
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
    chooser = TokenChooser(context.base.model, context.sampling, [0], 1)
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
    return Experience(shared_estimate(context), cost, Chooser(hopes))
