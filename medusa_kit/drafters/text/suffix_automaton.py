"""An online suffix automaton with counts: how often any string of a text occurs, what follows it.

A state represents the strings that end at the same positions of the text; its link leads to the
next shorter ones, which end at more positions. Reading a token takes amortised constant time and at
most two new states (Blumer et al. 1985), so the longest earlier match of a text's end is always
known.
Several texts can share an automaton; no string runs from one into the next.
"""

from collections.abc import Iterator

# (state, matched): the position of a text in an automaton. The state holds the text's last
# `matched` tokens, its longest known suffix of at most `max_match` tokens.
Cursor = tuple[int, int]
START: Cursor = (0, 0)


class SuffixAutomaton:
    """`read` adds a text token by token, `end` is its cursor, `levels` what followed its end."""

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.num_tokens = 0
        self._next: list[dict[int, int]] = [{}]  # by state: token -> state
        self._link, self._length = [-1], [0]  # length of its longest string
        self._count = [0]  # positions where its strings end; right up to max_match + 1 tokens
        self._last = 0  # the state of the whole text
        self._read: Cursor = START  # up to one token more than a cursor

    @property
    def end(self) -> Cursor:
        """The cursor of the text itself."""
        return self._fit(self._read[0], min(self._read[1], self.max_match))

    def read(self, token: int) -> None:
        self.num_tokens += 1
        self._last = self._extend(token)
        self._read = self._go(self._read, token, self.max_match + 1)
        state = self._read[0]
        while state > 0:  # longer strings are never looked up, so the walk is short even for a loop
            self._count[state] += 1
            state = self._link[state]

    def restart(self) -> None:
        """The next token read begins another text."""
        self._last, self._read = 0, START

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        """The cursor after one more token, of any text, not only the one that was read."""
        return self._go(cursor, token, self.max_match)

    def levels(self, cursor: Cursor) -> Iterator[tuple[int, dict[int, int]]]:
        """(tokens matched, {token: how often it followed}), the longest match first.

        Matches at the text's very end, which nothing follows, are left out.
        """
        state, matched = self._fit(*cursor)
        while state > 0:
            if following := self._next[state]:
                yield matched, {token: self._count[to] for token, to in following.items()}
            state = self._link[state]
            matched = self._length[state]

    def _fit(self, state: int, matched: int) -> Cursor:
        """The state that holds the last `matched` tokens, even if reading on has split it off."""
        while state and self._length[self._link[state]] >= matched:
            state = self._link[state]
        return state, matched

    def _go(self, cursor: Cursor, token: int, max_tokens: int) -> Cursor:
        state, matched = self._fit(*cursor)
        while state and token not in self._next[state]:
            state = self._link[state]
            matched = self._length[state]
        if token not in self._next[state]:
            return START
        return self._fit(self._next[state][token], min(matched + 1, max_tokens))

    def _extend(self, token: int) -> int:
        """The state of the text with one more token."""
        state, following = self._last, self._next
        if token in following[state]:  # only after a restart: the strings are known
            return self._of_length(state, token)
        new = self._new_state({}, 0, self._length[state] + 1, 0)
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._of_length(state, token)
        return new

    def _of_length(self, state: int, token: int) -> int:
        """The state that `token` leads to, split off from its longer strings if need be."""
        to = self._next[state][token]
        length = self._length[state] + 1
        if self._length[to] == length:
            return to
        split = self._new_state(dict(self._next[to]), self._link[to], length, self._count[to])
        while state >= 0 and self._next[state].get(token) == to:
            self._next[state][token] = split
            state = self._link[state]
        self._link[to] = split
        return split

    def _new_state(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._next) - 1
