"""A sorted index of many tokens: where any string occurs in past answers, and what follows it.

It takes eight bytes a token, an automaton in Python hundreds. But nothing can be added to it, so
new answers are kept in an automaton until there are enough of them (past_answers.py).
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

BETWEEN = -1  # follows each text; never part of a string that is looked up
SAMPLE = 32  # positions read where a string occurs more often
SHORT = (2, 1)  # lengths looked up besides the longest match

# Matches of a text's end, longest first: (first, one past the last, tokens matched) of the sorted
# positions at which its last tokens occur.
Ranges = tuple[tuple[int, int, int], ...]


class SuffixArray:
    """Positions of `texts`, sorted by the tokens that begin there, as far as they are compared."""

    def __init__(self, texts: "Iterable[array[int]]", max_match: int) -> None:
        self.max_match, self.sorted_by = max_match, 2 * max_match
        self.tokens = array("i")
        for text in texts:
            self.tokens.extend(text)
            self.tokens.append(BETWEEN)
        positions = _sorted_positions(np.array(self.tokens, dtype=np.intc), self.sorted_by)
        self.positions = array("i", positions.astype(np.intc).tobytes())

    def match(self, context: "array[int]", max_tokens: int) -> Ranges:
        """Ranges of the longest known end of `context`, at most `max_tokens`, and of shorter."""
        # Where an end occurs, every shorter one does, so the longest is found by bisection.
        found, missing = 0, min(max_tokens, self.max_match, len(context)) + 1
        ranges = dict[int, tuple[int, int]]()
        while missing - found > 1:
            length = (found + missing) // 2
            if between := self._find(context[-length:]):
                found, ranges[length] = length, between
            else:
                missing = length
        kept = [found, *(length for length in SHORT if length < found)] if found else []
        for length in kept:
            ranges[length] = ranges.get(length) or self._find(context[-length:]) or (0, 0)
        return tuple((*ranges[length], length) for length in kept)

    def advance(self, ranges: Ranges, token: int) -> Ranges:
        """The ranges of the same strings with `token` appended."""
        longer = []
        for first, end, matched in ranges:
            if matched < self.sorted_by:
                between = self._narrowed(first, end, matched, token)
                if between[0] < between[1]:
                    longer.append((*between, matched + 1))
        return tuple(longer)

    def levels(self, ranges: Ranges) -> Iterator[tuple[int, dict[int, int]]]:
        """(tokens matched, {token: how often it followed}), the longest match first."""
        for first, end, matched in ranges:
            step = -(-(end - first) // SAMPLE)
            counts = dict[int, int]()
            # They are sorted, so every next token gets its share.
            for position in self.positions[first:end:step]:
                token = self.tokens[position + matched]
                if token != BETWEEN:
                    counts[token] = counts.get(token, 0) + step
            if counts:
                yield min(matched, self.max_match), counts

    def _find(self, string: "array[int]") -> tuple[int, int] | None:
        """The range of positions where `string` occurs."""
        tokens, length = self.tokens, len(string)

        def beginning(position: int) -> "array[int]":
            return tokens[position : position + length]

        first = bisect_left(self.positions, string, key=beginning)
        if first == len(self.positions) or beginning(self.positions[first]) != string:
            return None
        return first, bisect_right(self.positions, string, lo=first, key=beginning)

    def _narrowed(self, first: int, end: int, matched: int, token: int) -> tuple[int, int]:
        tokens = self.tokens

        def follower(position: int) -> int:
            return tokens[position + matched]

        first = bisect_left(self.positions, token, first, end, key=follower)
        return first, bisect_right(self.positions, token, first, end, key=follower)


def _sorted_positions(tokens: np.ndarray, sorted_by: int) -> np.ndarray:
    """Positions sorted by at least `sorted_by` tokens from each on, by prefix doubling."""
    rank, length = tokens.astype(np.int64) - BETWEEN, 1
    while length < sorted_by and len(rank):
        later = np.zeros_like(rank)  # past the end, which sorts first
        later[:-length] = rank[length:] + 1
        _, rank = np.unique(rank * (rank.max() + 2) + later, return_inverse=True)
        length *= 2
    return np.argsort(rank, kind="stable")
