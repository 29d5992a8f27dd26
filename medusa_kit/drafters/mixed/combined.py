"""A tree of a fixed size with the likeliest guesses of several sources.

The chance of a kind of guess is how often it was right so far. A copied span that follows a match
of four tokens or more outranks everything else.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.first_chances import first_chances
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.drafters.mixed.under_grammar import under_grammar
from medusa_kit.drafters.native.mtp_layers import layers_or_error, num_layers
from medusa_kit.drafters.trie import Trie, TrieDrafter, draft_of, learn, weighed
from medusa_kit.infer.draft import (
    Draft,
    Drafter,
    RequestText,
    State,
    StepResult,
)
from medusa_kit.tree.dynamic import DynamicTree

LONG_MATCH = 4  # tokens
COPYING = ("suffix", "prompt-lookup")  # sources whose keys hold the length of the match


class CombinedDrafter(TrieDrafter):
    """Merges the tries of `sources` and keeps `num_nodes` nodes for each row."""

    name = "combined"

    def __init__(
        self,
        sources: Sequence[TrieDrafter],
        num_nodes: int,
        acceptance: AcceptanceEstimate,
        device: torch.device,
    ):
        super().__init__(device)
        self.sources, self.num_nodes, self.acceptance = sources, num_nodes, acceptance
        self.num_ranks = max((source.num_ranks for source in sources), default=0)
        self.reads_prompts = any(source.reads_prompts for source in sources)
        self.watches = tuple(layer for source in sources for layer in source.watches)
        self.chains = False  # whether a row's guesses must follow one another
        self.reasons: list[str] = []  # why expected sources are missing
        self.credits: list[list[str]] = []
        self._tries: list[Trie] = []

    def describe(self) -> str:
        return "combined: " + " + ".join(source.name for source in self.sources)

    @property
    def notes(self) -> list[str]:
        return [*self.reasons, *(note for source in self.sources for note in source.notes)]

    def begin(self, request: RequestText) -> None:
        for source in self.sources:
            source.begin(request)

    def guess(self, state: State) -> list[Trie]:
        tries = merged(self.sources, state, self.acceptance)
        orders = [
            (trie.best_path() if self.chains else trie.by_chance(_long_match))[: self.num_nodes]
            for trie in tries
        ]
        return [
            trie.kept([node for node, _ in order])
            for trie, order in zip(tries, orders, strict=True)
        ]

    def propose(self, state: State) -> Draft:
        self._tries = self.guess(state)
        return draft_of(self._tries, self.device)

    def observe(self, step: StepResult) -> None:
        learn(self.acceptance, self._tries, step)
        self.credits = credited(self._tries, step)
        for source in self.sources:
            source.observe(step)

    def finish(self, requests: Sequence[RequestText]) -> None:
        for source in self.sources:
            source.finish(requests)


def merged(
    sources: Sequence[TrieDrafter], state: State, acceptance: AcceptanceEstimate
) -> list[Trie]:
    """One trie for each row with the guesses of all sources, each with its kind's chance so far,
    and with what a grammar forces."""
    result = [Trie(root) for root in state.roots_B]
    for source in sources:
        for whole, trie in zip(result, source.guess(state), strict=True):
            whole.merge(weighed(trie, acceptance))
    return under_grammar(result, state, acceptance)


def credited(tries: Sequence[Trie], step: StepResult) -> list[list[str]]:
    """The source of each accepted token; of several that guessed it, the surest one."""
    return [
        [source_of(trie.keys[node]) for node in path]
        for trie, path in zip(tries, step.paths, strict=True)
    ]


def source_of(key: Any) -> str:
    """The source whose guesses have this key."""
    return str(key[0] if isinstance(key, tuple) else key)


def _long_match(key: Any) -> bool:
    return isinstance(key, tuple) and key[0] in COPYING and key[1] >= LONG_MATCH


def build_sources(
    context: DraftContext, names: Sequence[str], options: dict[str, dict[str, Any]]
) -> list[TrieDrafter]:
    """Raises ConfigError for a source without anything to draft with, or a wrong option."""
    sources: list[TrieDrafter] = []
    for name in dict.fromkeys(names):
        drafter: Any = build_drafter(name, context, options.get(name))
        sources.append(
            HeadsSource(getattr(drafter, "inner", drafter), context.acceptance)
            if name == "medusa"
            else drafter
        )
    return sources


def shared_estimate(context: DraftContext) -> AcceptanceEstimate:
    """The acceptance estimate that all requests of this engine share."""
    key: Hashable = "acceptance of draft tokens"
    return context.remembered(key, lambda: AcceptanceEstimate(first_chances()))


def usual_sources(
    context: DraftContext, asked: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """(sources, why expected ones are missing)."""
    if asked is not None:
        return list(asked), []
    names, reasons = ["suffix", "recycling"], []
    if context.heads is not None:
        if isinstance(context.tree, DynamicTree) and context.tree.doubts:
            names.remove("recycling")  # what such heads guess is right more often (docs/LOG.md)
        names.append("medusa")
    else:
        refused = context.heads_refused
        reasons.append(
            f"heads refused: {refused}" if refused else f"no heads for {context.base.info.name!r}"
        )
    if context.draft_model is not None:
        names.append("draft-model")
    if num_layers(context.base.config):
        _, error = layers_or_error(context.base, context.memory)
        if error is None:
            names.append("mtp")
        else:
            reasons.append(error.message)
    return names, reasons


def build(context: DraftContext, options: Any) -> Drafter:
    names, reasons = usual_sources(context, options.sources)
    sources = build_sources(context, names, options.options)
    drafter = CombinedDrafter(sources, options.num_nodes, shared_estimate(context), context.device)
    drafter.reasons, drafter.chains = reasons, context.verifier.chains_only
    return drafter
