"""The longest earlier matches of the text's end, in prompt, answer and past answers, as a tree.

A token's chance is what its counts say, longest match first. Where the last l tokens stood t times
before, k different tokens followed, and this one n times, that length says n / t with the weight
t / (t + k * doubt[l]), and the next shorter match has a say in the rest:

    P_l(token) = (n + k * doubt[l] * P_shorter(token)) / (t + k * doubt[l]),    P_0 = 0

so that a single match of one token is worth 1/3 and of eight tokens 3/4 and more; what went on
differently each time has earned its doubt (Witten and Bell 1991). The likeliest paths grow first.
A path that reaches the text's end goes on by what follows its own tokens, so that a loop is
predicted beyond its last turn. Trees of counts: SuffixDecoding (arXiv 2411.04975); the automaton:
SAM decoding (arXiv 2411.10666).
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.text.past_answers import PastAnswers, tokenizer_identity
from medusa_kit.drafters.text.prompt_lookup import unread
from medusa_kit.drafters.text.suffix_array import Ranges, SuffixArray
from medusa_kit.drafters.text.suffix_automaton import START, Cursor, SuffixAutomaton
from medusa_kit.drafters.trie import Trie, TrieDrafter
from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.infer.draft import State
from medusa_kit.settings.drafters import SuffixOptions

# By tokens matched, the last for all above; fitted to answers of SmolLM2-135M by likelihood. What
# stood in other texts says less than what stood in this one.
DOUBTS = (
    *(0.0, 2.2, 1.1, 0.88, 0.75, 0.67, 0.52, 0.46, 0.38),
    *(0.36, 0.35, 0.3, 0.28, 0.27, 0.25, 0.22, 0.15),
)
PAST_DOUBTS = (
    *(0.0, 7.0, 7.0, 7.0, 6.5, 4.7, 4.2, 4.2, 3.2),
    *(3.2, 3.0, 2.5, 2.4, 1.5, 1.4, 1.3, 0.4),
)
LONG = 8  # longer matches are one kind of guess
LEAST = 0.05  # a path that is less likely is not worth its node

Key = tuple[str, int]  # suffix, or past where other texts knew it; tokens of the longest match
Level = tuple[int, str, float, dict[int, int]]  # matched, kind, doubt, how often each followed


class Place(Protocol):
    """Where a row stands in some text. A cursor says where a guess of its future would stand."""

    @property
    def end(self) -> Any: ...

    def read(self, token: int) -> None: ...

    def advance(self, cursor: Any, token: int) -> Any: ...

    def levels(self, cursor: Any) -> Iterator[tuple[int, dict[int, int]]]: ...


class RecentPlace:
    """Where a row stands in the automaton of other texts."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.advance, self.levels = automaton.advance, automaton.levels
        self.end: Cursor = START

    def read(self, token: int) -> None:
        self.end = self.advance(self.end, token)


class SortedPlace:
    """Where a row stands in a suffix array."""

    def __init__(self, index: SuffixArray) -> None:
        self.index, self.advance, self.levels = index, index.advance, index.levels
        self._context = array("i")
        self._most = 0  # a match grows by a token at a time

    def read(self, token: int) -> None:
        self._context.append(token)
        self._most += 1

    @property
    def end(self) -> Ranges:
        del self._context[: -self.index.max_match]
        ranges = self.index.match(self._context, self._most)
        self._most = ranges[0][2] if ranges else 0
        return ranges


def blended(levels: Iterable[Level], least: float) -> dict[int, tuple[float, Key]]:
    """{token: (chance, its longest match)}, as long as what is left to say is `least` or more."""
    found = dict[int, tuple[float, Key]]()
    left = 1.0
    for matched, kind, doubt, counts in levels:
        key = kind, min(matched, LONG)
        unit = left / (sum(counts.values()) + doubt)
        for token, count in counts.items():
            chance, longest = found.get(token, (0.0, key))
            found[token] = (chance + unit * count, longest)
        left = unit * doubt
        if left < least:
            break
    return found


class SuffixRow:
    """One row's text, and what other texts it is looked up in."""

    def __init__(self, max_match: int, past: PastAnswers | None) -> None:
        self.text = SuffixAutomaton(max_match)
        self.places: list[Place] = [self.text]
        if past is not None and past.recent.num_tokens:
            self.places.append(RecentPlace(past.recent))
        if past is not None and past.sorted.tokens:
            self.places.append(SortedPlace(past.sorted))

    def read(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            for place in self.places:
                place.read(token)

    def grow(self, root: int, num_nodes: int) -> Trie:
        """The likeliest `num_nodes` nodes after the root, best first.

        Guesses of a kind match as much and are believed alike, to a tenth.
        """
        trie = Trie(root)
        queue: list[tuple[float, int, int, int, float, Key, list[Any]]] = []
        self._push(queue, 0, 1.0, [place.end for place in self.places])
        while queue and trie.num_nodes < num_nodes:
            negative, _, parent, token, chance, key, cursors = heapq.heappop(queue)
            node = trie.add(parent, token, chance, (*key, int(10 * chance)))
            if trie.num_nodes < num_nodes:
                ahead = [
                    place.advance(cursor, token)
                    for place, cursor in zip(self.places, cursors, strict=True)
                ]
                self._push(queue, node, -negative, ahead)
        return trie

    def _push(self, queue: list[Any], node: int, path: float, cursors: list[Any]) -> None:
        """What may follow `node`, where the path to it and the token are likely enough."""
        least = LEAST / path
        for token, (chance, key) in blended(self._levels(cursors), least).items():
            if chance >= least:
                entry = (-path * chance, len(queue), node, token, chance, key, cursors)
                heapq.heappush(queue, entry)

    def _levels(self, cursors: list[Any]) -> Iterable[Level]:
        """Longest match first, the row's own text before others."""
        own = _doubted("suffix", DOUBTS, self.text.levels(cursors[0]))
        if len(cursors) == 1:
            return own
        others = zip(self.places[1:], cursors[1:], strict=True)
        past = [_doubted("past", PAST_DOUBTS, place.levels(cursor)) for place, cursor in others]
        return heapq.merge(own, *past, key=lambda level: -level[0])


def _doubted(
    kind: str, doubts: Sequence[float], levels: Iterable[tuple[int, dict[int, int]]]
) -> Iterator[Level]:
    for matched, counts in levels:
        yield matched, kind, len(counts) * doubts[min(matched, len(doubts) - 1)], counts


class SuffixDrafter(TrieDrafter):
    name = "suffix"

    def __init__(
        self, options: SuffixOptions, device: torch.device, past: PastAnswers | None = None
    ) -> None:
        super().__init__(device)
        self.options, self.num_nodes, self.past = options, options.num_nodes, past
        self.notes: list[str] = []
        self._rows: list[SuffixRow] = []
        self._reading = past.lock if past is not None else nullcontext()

    def join(self, state: State) -> None:
        with self._reading:
            self._rows += [SuffixRow(self.options.max_match, self.past) for _ in state.tokens]

    def guess(self, state: State) -> list[Trie]:
        tries = []
        with self._reading:
            for row, tokens, root in zip(self._rows, state.tokens, state.roots_B, strict=True):
                row.read(unread(tokens, root, row.text.num_tokens))
                tries.append(row.grow(root, self.num_nodes))
        return tries

    def select_rows(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def end(self, answers: Sequence[Sequence[int]]) -> None:
        """Keep the answers. What cannot be saved is a note, since the answers are there."""
        if self.past is None:
            return
        self.past.add(answers)
        try:
            self.past.save()
        except (MedusaKitError, OSError) as error:
            self.notes.append(f"past answers were not saved: {error}")


def build(context: DraftContext, options: SuffixOptions) -> SuffixDrafter:
    """Raises ConfigError, CheckpointError where the store cannot be used."""
    past = None
    if options.store is not None:
        past = _past_answers(context, Path(options.store).expanduser().absolute(), options)
    return SuffixDrafter(options, context.device, past)


def _past_answers(context: DraftContext, path: Path, options: SuffixOptions) -> PastAnswers:
    """The engine's, with what the file has now."""
    if path.is_dir():
        raise ConfigError(
            f"drafter suffix: store {str(path)!r} is a folder; expected a file",
            hint="name a file in it",
        )
    most, longest = options.store_tokens, options.max_match
    past = context.remembered(
        ("past answers", path, most, longest),
        lambda: PastAnswers(path, tokenizer_identity(context.base), most, longest),
    )
    past.refresh()
    return past
