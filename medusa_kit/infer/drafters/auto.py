"""At each position what pays: which sources to ask, how many nodes to verify, or none at all.

Free sources (text and tables) are asked at every step. How many of the merged guesses are verified
follows from their chances and from what a node costs on this machine, measured while decoding.
Heads and draft models cost time to ask: `Chooser` finds out where that pays.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_kit.infer.drafters.base import Draft, Drafter, State, StepResult, notes_of, tell_end
from medusa_kit.infer.drafters.chooser import Chooser
from medusa_kit.infer.drafters.combined import (
    build_sources,
    learn,
    merged,
    shared_luck,
    usual_sources,
)
from medusa_kit.infer.drafters.experience import Luck, StepCost
from medusa_kit.infer.drafters.factory import DraftContext, build_drafter
from medusa_kit.infer.drafters.trie import Source, Trie, draft_of

COSTLY = ("medusa", "draft-model")
SLOPES = {"cpu": 0.12, "cuda": 0.01}  # of a node more, in one-node steps, until it is measured
HOPES = {"medusa": 0.5, "draft-model": 1.0}  # tokens a step that a costly source adds, at first


@dataclass
class Experience:
    """What all requests of an engine have taught; batches of different sizes apart."""

    luck: Luck
    cost: StepCost
    chooser: Chooser


@dataclass
class _Step:
    """What was done in the step under way."""

    tries: list[Trie]
    situation: int | None  # None: the first step of all, which only measures
    choice: int
    start: float
    drafted: float = 0.0


@dataclass
class _Share:
    steps: int = 0
    tokens: int = 0


@dataclass
class AutoDrafter:
    """`free` sources at every step, one of `costly` where it pays. `clock` gives seconds."""

    free: Sequence[Source]
    costly: Sequence[Source]
    experience: Experience
    device: Any
    max_nodes: int
    reasons: Sequence[str] = ()
    clock: Callable[[], float] = time.perf_counter
    shares: dict[str, _Share] = field(default_factory=dict)
    _step: _Step | None = None

    @property
    def num_nodes(self) -> int:
        return self.max_nodes

    @property
    def name(self) -> str:
        """Auto, and what drafted how often."""
        steps = sum(share.steps for share in self.shares.values())
        ranked = sorted(self.shares.items(), key=lambda item: -item[1].steps)
        parts = [f"{name} {share.steps / steps:.0%}" for name, share in ranked]
        return f"auto ({', '.join(parts)})" if parts else "auto"

    @property
    def notes(self) -> list[str]:
        told = [
            f"{name}: {share.steps} steps, {share.tokens / share.steps:.2f} tokens each"
            for name, share in self.shares.items()
        ]
        sources = [note for source in (*self.free, *self.costly) for note in notes_of(source)]
        return [*self.reasons, *told, *sources]

    def begin(self, state: State) -> None:
        for source in (*self.free, *self.costly):
            source.begin(state)

    def propose(self, state: State) -> Draft:
        start, B = self.clock(), len(state.roots_B)
        luck, cost = self.experience.luck, self.experience.cost
        tries = merged(self.free, state, luck)
        orders = [trie.by_chance() for trie in tries]
        size, promised = best_size(orders, cost, self.max_nodes)
        situation, choice = None, 0
        if cost.measured:
            step_seconds = cost.seconds(B * size) / B
            situation, choice = self.experience.chooser.choose(promised / B, step_seconds)
        if choice:
            for whole, more in zip(
                tries, merged([self.costly[choice - 1]], state, luck), strict=True
            ):
                whole.merge(more)
            orders = [trie.by_chance() for trie in tries]
            size, _ = best_size(orders, cost, self.max_nodes)
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
        experience.cost.record(B * step.draft.tokens_BN.shape[1], now - did.drafted)
        if did.situation is not None:
            seconds = (now - did.start) / B
            experience.chooser.record(did.situation, did.choice, emitted / B, seconds)
        learn(experience.luck, did.tries, step)
        for source in (*self.free, *self.costly):
            source.observe(step)
        for trie, path in zip(did.tries, step.paths, strict=True):
            share = self.shares.setdefault(_sources_of(trie), _Share())
            share.steps += 1
            share.tokens += 1 + len(path)

    def select_rows(self, rows: Sequence[int]) -> None:
        for source in (*self.free, *self.costly):
            source.select_rows(rows)

    def end(self, answers: Sequence[Sequence[int]]) -> None:
        for source in (*self.free, *self.costly):
            tell_end(source, answers)


Order = Sequence[tuple[int, float]]  # a row's nodes with their chances, likeliest first


def best_size(orders: Sequence[Order], cost: StepCost, max_nodes: int) -> tuple[int, float]:
    """(nodes a row, tokens they promise over all rows) with the most tokens a second."""
    B = len(orders)
    gains = [0.0] * max_nodes  # of the n-th likeliest node, over the rows
    for order in orders:
        for place, (_, chance) in enumerate(order[:max_nodes]):
            gains[place] += chance
    best, tokens, promised = 1, float(B), float(B)
    rate = tokens / cost.seconds(B)
    for size in range(2, max_nodes + 1):
        if gains[size - 1] == 0.0:
            break
        tokens += gains[size - 1]
        if tokens / cost.seconds(B * size) > rate:
            best, promised, rate = size, tokens, tokens / cost.seconds(B * size)
    return best, promised


def _sources_of(trie: Trie) -> str:
    """Whose guesses a tree holds; none where it is the root alone."""
    names = {str(key[0]) for key in trie.keys if isinstance(key, tuple)}
    return " + ".join(sorted(names)) or "none"


def build(context: DraftContext, options: Any) -> Drafter:
    """Heads where there are any, the draft model where one is named, and free sources."""
    if options.sources is None and context.heads is not None and context.verifier.fixed is not None:
        return build_drafter("medusa", context)  # steps of fixed shapes know heads only
    names, reasons = usual_sources(context, options.sources)
    given = {**free_sizes(options.max_nodes), **options.options}
    sources = build_sources(context, names, given)
    free = [source for source in sources if source.name not in COSTLY]
    costly = [source for source in sources if source.name in COSTLY]
    key = ("auto", tuple(names), context.batch_size)
    experience = context.remembered(key, lambda: _fresh(context, costly))
    return AutoDrafter(free, costly, experience, context.device, options.max_nodes, reasons)


def free_sizes(max_nodes: int) -> dict[str, dict[str, Any]]:
    """How much free sources guess: what is not worth verifying is left out afterwards."""
    return {
        "suffix": {"num_nodes": max_nodes},
        "prompt-lookup": {"num_tokens": max_nodes - 1},
        "recycling": {"num_nodes": min(max_nodes, 6)},
    }


def _fresh(context: DraftContext, costly: Sequence[Source]) -> Experience:
    hopes = [0.0, *(HOPES[source.name] for source in costly)]
    cost = StepCost(SLOPES.get(context.device.type, SLOPES["cuda"]))
    return Experience(shared_luck(context), cost, Chooser(hopes))
