"""The longest earlier matches of the text's end, in prompt, answer and past answers, as a tree.

A token's chance follows from its counts, longest match first. If the last l tokens occurred t times
before, followed by k different tokens, n times by this one, then that length estimates n / t with
the weight t / (t + k * smoothing[l]), and the next shorter match provides the rest:

    P_l(token) = (n + k * smoothing[l] * P_shorter(token)) / (t + k * smoothing[l]),    P_0 = 0

So a single match of one token is worth 1/3, one of eight tokens 3/4 and more; matches that were
followed by many different tokens count for less (Witten and Bell 1991). The likeliest paths grow
first. A path that reaches the text's end continues with what follows its own tokens, so that a loop
is predicted beyond its last round. Trees of counts: SuffixDecoding (arXiv 2411.04975); the
automaton: SAM decoding (arXiv 2411.10666).
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from medusa_kit.drafters.estimates import chance_class
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.text.past_answers import PastAnswers, tokenizer_identity
from medusa_kit.drafters.text.suffix_array import Ranges, SuffixArray
from medusa_kit.drafters.text.suffix_automaton import START, Cursor, SuffixAutomaton
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.infer.decode.drafter import RequestText, State, unread
from medusa_kit.paths import whole
from medusa_kit.settings.drafters import SuffixOptions
from medusa_kit.tree.draft_tree import DraftTree

# By tokens matched, the last for all above; fitted to answers of SmolLM2-135M by likelihood.
# Matches in other texts count for less than those in this one.
SMOOTHING = (
    *(0.0, 2.2, 1.1, 0.88, 0.75, 0.67, 0.52, 0.46, 0.38),
    *(0.36, 0.35, 0.3, 0.28, 0.27, 0.25, 0.22, 0.15),
)
PAST_SMOOTHING = (
    *(0.0, 7.0, 7.0, 7.0, 6.5, 4.7, 4.2, 4.2, 3.2),
    *(3.2, 3.0, 2.5, 2.4, 1.5, 1.4, 1.3, 0.4),
)
MIN_CHANCE = 0.05  # less likely paths are not looked for, however cheap nodes are

Level = tuple[int, str, float, dict[int, int]]  # matched, kind, weight of shorter ones, counts


class TextPosition(Protocol):
    """The position of a row in a text. A cursor is the position after a drafted continuation."""

    @property
    def end(self) -> Any: ...

    def read(self, token: int) -> None: ...

    def advance(self, cursor: Any, token: int) -> Any: ...

    def levels(self, cursor: Any) -> Iterator[tuple[int, dict[int, int]]]: ...


class RecentPosition:
    """The position of a row in the automaton of other texts."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.advance, self.levels = automaton.advance, automaton.levels
        self.end: Cursor = START

    def read(self, token: int) -> None:
        self.end = self.advance(self.end, token)


class SortedPosition:
    """The position of a row in a suffix array."""

    def __init__(self, index: SuffixArray) -> None:
        self.index, self.advance, self.levels = index, index.advance, index.levels
        self._context = array("i")
        self._most = 0  # the longest possible match, which grows by one token at a time

    def read(self, token: int) -> None:
        self._context.append(token)
        self._most += 1

    @property
    def end(self) -> Ranges:
        del self._context[: -self.index.max_match]
        ranges = self.index.match(self._context, self._most)
        self._most = ranges[0][2] if ranges else 0
        return ranges


def blended(levels: Iterable[Level], min_chance: float) -> dict[int, tuple[float, str]]:
    """{token: (chance, kind of its longest match)}, until the weight left is below `min_chance`."""
    found = dict[int, tuple[float, str]]()
    remaining = 1.0
    for _, kind, weight, counts in levels:
        unit = remaining / (sum(counts.values()) + weight)
        for token, count in counts.items():
            chance, longest = found.get(token, (0.0, kind))
            found[token] = (chance + unit * count, longest)
        remaining = unit * weight
        if remaining < min_chance:
            break
    return found


class SuffixRow:
    """One row's text, and the other texts that it is looked up in."""

    def __init__(self, max_match: int, past: PastAnswers | None) -> None:
        self.text = SuffixAutomaton(max_match)
        self.positions: list[TextPosition] = [self.text]
        if past is not None and past.recent.num_tokens:
            self.positions.append(RecentPosition(past.recent))
        if past is not None and past.sorted.tokens:
            self.positions.append(SortedPosition(past.sorted))

    def read(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            for position in self.positions:
                position.read(token)

    def grow(self, root: int, num_nodes: int, min_chance: float = MIN_CHANCE) -> DraftTree:
        """The likeliest `num_nodes` nodes after the root, best first; no paths with a chance below
        `min_chance`.

        Draft tokens of the same kind with about the same chance share a key.
        """
        tree = DraftTree(root)
        queue: list[tuple[float, int, int, int, float, str, list[Any]]] = []
        self._push(queue, 0, 1.0, min_chance, [position.end for position in self.positions])
        while queue and tree.num_nodes < num_nodes:
            negative, _, parent, token, chance, kind, cursors = heapq.heappop(queue)
            node = tree.add(parent, token, chance, (kind, chance_class(chance)))
            if tree.num_nodes < num_nodes:
                ahead = [
                    position.advance(cursor, token)
                    for position, cursor in zip(self.positions, cursors, strict=True)
                ]
                self._push(queue, node, -negative, min_chance, ahead)
        return tree

    def _push(
        self, queue: list[Any], node: int, path: float, min_path_chance: float, cursors: list[Any]
    ) -> None:
        """Queue the tokens that may follow `node`, where the path with them is likely enough."""
        min_chance = min_path_chance / path
        for token, (chance, kind) in blended(self._levels(cursors), min_chance).items():
            if chance >= min_chance:
                entry = (-path * chance, len(queue), node, token, chance, kind, cursors)
                heapq.heappush(queue, entry)

    def _levels(self, cursors: list[Any]) -> Iterable[Level]:
        """Longest match first, the row's own text before others."""
        own = _smoothed("suffix", SMOOTHING, self.text.levels(cursors[0]))
        if len(cursors) == 1:
            return own
        others = zip(self.positions[1:], cursors[1:], strict=True)
        past = [
            _smoothed("past", PAST_SMOOTHING, position.levels(cursor))
            for position, cursor in others
        ]
        return heapq.merge(own, *past, key=lambda level: -level[0])


def _smoothed(
    kind: str, smoothing: Sequence[float], levels: Iterable[tuple[int, dict[int, int]]]
) -> Iterator[Level]:
    for matched, counts in levels:
        yield matched, kind, len(counts) * smoothing[min(matched, len(smoothing) - 1)], counts


class SuffixDrafter(TreeDrafter):
    name = "suffix"

    def __init__(
        self, options: SuffixOptions, device: torch.device, past: PastAnswers | None = None
    ) -> None:
        super().__init__(device)
        self.options, self.num_nodes, self.past = options, options.num_nodes, past
        self._failures: list[str] = []
        self._reading = past.lock if past is not None else nullcontext()

    @property
    def notes(self) -> list[str]:
        return self._failures

    def guess(self, state: State) -> list[DraftTree]:
        trees = []
        with self._reading:
            for one in state.requests:
                row = one.own(self, self._row)
                row.read(unread(one.text, one.root, row.text.num_tokens))
                trees.append(row.grow(one.root, self.num_nodes, max(MIN_CHANCE, self._min_chance)))
        return trees

    def _row(self) -> SuffixRow:
        return SuffixRow(self.options.max_match, self.past)

    def finish(self, requests: Sequence[RequestText]) -> None:
        """Keep the answers. A failure to save them is only a note, since the request succeeded."""
        answers = [one.token_ids for one in requests if one.is_complete]
        if self.past is None or not answers:
            return
        self.past.add(answers)
        try:
            self.past.save()
        except (MedusaKitError, OSError) as error:
            note = f"past answers were not saved: {error}"
            self._failures = [*(one for one in self._failures if one != note), note]


def build(context: DraftContext, options: SuffixOptions) -> SuffixDrafter:
    """Raises ConfigError or CheckpointError where the store cannot be used."""
    past = None
    if options.store is not None:
        past = _past_answers(context, whole(options.store), options)
    return SuffixDrafter(options, context.device, past)


def _past_answers(context: DraftContext, path: Path, options: SuffixOptions) -> PastAnswers:
    """The engine's past answers, updated from the file."""
    if path.is_dir():
        raise ConfigError(
            f"drafter suffix: store {str(path)!r} is a folder; expected a file",
            hint="name a file in it",
        )
    most, longest, base = options.store_tokens, options.max_match, context.base
    past = context.memory.learned.remembered(
        ("past answers", path, most, longest),
        lambda: PastAnswers(path, tokenizer_identity(base), base.info.vocab_size, most, longest),
    )
    past.follow()
    return past
