"""Who waits, reads its prompt, or runs: the order of work in a batch that rows join and leave.

Plain Python over keys, so that it can be followed, and tested, without a model. Rows are served in
the order in which they came. Prompts are read in pieces, and what one piece may hold is bounded
while other rows run, which bounds the time between their tokens.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass
class _Prompt(Generic[K]):
    key: K
    length: int
    place: int = -1
    read: int = 0


@dataclass(frozen=True)
class Piece(Generic[K]):
    """Tokens `start` to before `end` of a prompt, to be read into the row `place` of the cache."""

    key: K
    place: int
    start: int
    end: int
    is_last: bool


class Schedule(Generic[K]):
    """`max_rows`: rows that may read their prompts or run at once, each in a place of its own.
    `prompt_budget`: tokens of prompts that may be read between two steps while rows run; None: all
    there are."""

    def __init__(self, max_rows: int, prompt_budget: int | None = None) -> None:
        self.max_rows, self.prompt_budget = max_rows, prompt_budget
        self._free = list(range(max_rows))
        self._waiting: deque[_Prompt[K]] = deque()
        self._reading: deque[_Prompt[K]] = deque()
        self._running: dict[K, int] = {}  # with their places

    @property
    def num_rows(self) -> int:
        """Rows that wait, read or run."""
        return len(self._waiting) + self._num_served

    @property
    def free(self) -> Sequence[int]:
        """Places without a row."""
        return self._free

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, key: K, prompt_length: int) -> None:
        self._waiting.append(_Prompt(key, prompt_length))

    def add_places(self, count: int) -> None:
        """New places, numbered after those that are there."""
        first = len(self._free) + self._num_served
        self._free += range(first, first + count)

    def admit(self, choose: Callable[[K, Sequence[int]], tuple[int, int]]) -> list[tuple[K, int]]:
        """Give free places to those that wait: (key, place) of each.

        `choose(key, free places)` says which, and how many tokens of its prompt lie there already,
        less than all of them.
        """
        admitted = []
        while self._waiting and self._free and self._num_served < self.max_rows:
            prompt = self._waiting.popleft()
            prompt.place, prompt.read = choose(prompt.key, self._free)
            self._free.remove(prompt.place)
            self._reading.append(prompt)
            admitted.append((prompt.key, prompt.place))
        return admitted

    @property
    def _num_served(self) -> int:
        return len(self._reading) + len(self._running)

    def pieces(self, most: int) -> list[Piece[K]]:
        """What to read next, at most so many tokens at once: of the earliest prompt, then of those
        after it. `begin` follows for a key whose last piece has been read."""
        pieces, left = [], most
        for prompt in self._reading:
            if not left:
                break
            end = min(prompt.length, prompt.read + left)
            is_last = end == prompt.length
            pieces.append(Piece(prompt.key, prompt.place, prompt.read, end, is_last))
            left -= end - prompt.read
            prompt.read = end
        return pieces

    def begin(self, key: K) -> None:
        """The prompt has been read: the row runs from now on."""
        prompt = next(one for one in self._reading if one.key == key)
        self._reading.remove(prompt)
        self._running[key] = prompt.place

    def place_of(self, key: K) -> int:
        """The place of a row that runs."""
        return self._running[key]

    def leave(self, key: K) -> int | None:
        """Forget a row, wherever it is, and free its place, which is returned if it had one."""
        place = self._running.pop(key, None)
        for queue in (self._waiting, self._reading):
            for prompt in [one for one in queue if one.key == key]:
                queue.remove(prompt)
                place = prompt.place if prompt.place >= 0 else place
        if place is not None:
            self._free.append(place)
        return place
