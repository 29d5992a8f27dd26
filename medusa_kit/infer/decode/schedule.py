"""Who waits, reads its prompt, or runs: the order of work in a batch that requests join and leave.

Plain Python over keys, so that it can be followed, and tested, without a model. Requests are served
in the order in which they came. Prompts are read in pieces between steps, for a bounded time while
other requests run, which bounds the time between their tokens.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
MIN_TOKENS = 16  # tokens of prompts that are read between two steps in any case: each gets on
NEWEST = 0.5  # weight of the newest measurement
# (key, free slots, keys that get a slot after it) -> (its slot, how many tokens of its prompt
# are cached there already, less than all of them)
Choose = Callable[[K, Sequence[int], Sequence[K]], tuple[int, int]]


@dataclass
class _Prompt(Generic[K]):
    key: K
    length: int
    slot: int = -1
    read: int = 0


@dataclass(frozen=True)
class Piece(Generic[K]):
    """Tokens `start` to before `end` of a prompt, to be read into `slot` of the cache."""

    key: K
    slot: int
    start: int
    end: int
    is_last: bool


class ReadingSpeed:
    """How many tokens of prompts can be read in `max_pause` seconds, by the speed so far."""

    def __init__(self, max_pause: float) -> None:
        self._max_pause = max_pause
        self._per_token: float | None = None  # seconds, for about as many tokens as may be read

    @property
    def num_tokens(self) -> int:
        """MIN_TOKENS, or more where they were read in time."""
        return (
            max(MIN_TOKENS, int(self._max_pause / self._per_token))
            if self._per_token
            else MIN_TOKENS
        )

    def record(self, tokens: int, seconds: float) -> None:
        """Note how long a reading of so many tokens took. Many tokens at once take less time each
        than few, so that only numbers near the one that may be read say how long that takes."""
        old, per_token = self._per_token, max(seconds, 1e-9) / tokens
        if old is None:
            self._per_token = per_token
        elif self.num_tokens <= 2 * tokens <= 4 * self.num_tokens:
            self._per_token = old + NEWEST * (per_token - old)


class Schedule(Generic[K]):
    """`max_rows`: requests that may read their prompts or run at once, each in a slot of its own.
    `max_pause`: seconds for which prompts may be read between two steps while requests run; None:
    until all have been read. `clock`: in seconds."""

    def __init__(
        self,
        max_rows: int,
        max_pause: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_rows, self._max_pause, self._clock = max_rows, max_pause, clock
        self._speed = None if max_pause is None else ReadingSpeed(max_pause)
        self._free = list(range(max_rows))
        self._waiting: deque[_Prompt[K]] = deque()
        self._reading: deque[_Prompt[K]] = deque()
        self._running: dict[K, int] = {}  # with their slots

    @property
    def num_requests(self) -> int:
        """Requests that wait, read or run."""
        return len(self._waiting) + self._num_served

    @property
    def free(self) -> Sequence[int]:
        """Slots without a request."""
        return self._free

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, key: K, prompt_length: int) -> None:
        self._waiting.append(_Prompt(key, prompt_length))

    def add_slots(self, count: int) -> None:
        """Add `count` slots, numbered after those that are there."""
        first = len(self._free) + self._num_served
        self._free += range(first, first + count)

    def admit(self, choose: Choose[K]) -> list[tuple[K, int]]:
        """Give free slots to those that wait: (key, slot) of each."""
        admitted = []
        while self._waiting and self._free and self._num_served < self.max_rows:
            prompt = self._waiting.popleft()
            remaining = min(len(self._free), self.max_rows - self._num_served) - 1
            later = [prompt.key for prompt in islice(self._waiting, remaining)]
            prompt.slot, prompt.read = choose(prompt.key, self._free, later)
            self._free.remove(prompt.slot)
            self._reading.append(prompt)
            admitted.append((prompt.key, prompt.slot))
        return admitted

    @property
    def _num_served(self) -> int:
        return len(self._reading) + len(self._running)

    def reading(self, max_tokens: int) -> Iterator[list[Piece[K]]]:
        """What to read before the next step, at most `max_tokens` at once: of the earliest prompt,
        then of those after it. `begin` follows for a key whose last piece has been read.

        Where none runs, a step is a call or what may be read while some run, whichever is more.
        """
        if (speed := self._speed) is None or self._max_pause is None:
            while pieces := self._pieces(max_tokens):
                yield pieces
            return
        started, read = self._clock(), 0
        remaining = speed.num_tokens if self._running else max(speed.num_tokens, max_tokens)
        while remaining > 0 and (pieces := self._pieces(min(max_tokens, remaining))):
            size = sum(piece.end - piece.start for piece in pieces)
            remaining, read = remaining - size, read + size
            yield pieces
            if self._running and self._clock() - started >= self._max_pause:
                break
        if read:
            speed.record(read, self._clock() - started)

    def _pieces(self, max_tokens: int) -> list[Piece[K]]:
        pieces, remaining = [], max_tokens
        for prompt in self._reading:
            if not remaining:
                break
            end = min(prompt.length, prompt.read + remaining)
            is_last = end == prompt.length
            pieces.append(Piece(prompt.key, prompt.slot, prompt.read, end, is_last))
            remaining -= end - prompt.read
            prompt.read = end
        return pieces

    def begin(self, key: K) -> None:
        """Let a request run from now on, since its prompt has been read."""
        prompt = next(prompt for prompt in self._reading if prompt.key == key)
        self._reading.remove(prompt)
        self._running[key] = prompt.slot

    def has_begun(self, key: K) -> bool:
        """Whether a request has been given a slot."""
        return key in self._running or any(prompt.key == key for prompt in self._reading)

    def slot_of(self, key: K) -> int:
        """The slot of a request that runs."""
        return self._running[key]

    def slots_read_into(self) -> dict[int, K]:
        """The slots of requests whose prompts are being read."""
        return {prompt.slot: prompt.key for prompt in self._reading}

    def leave(self, key: K) -> int | None:
        """Forget a request, wherever it is, and free its slot, which is returned if it had one."""
        slot = self._running.pop(key, None)
        for queue in (self._waiting, self._reading):
            for prompt in [prompt for prompt in queue if prompt.key == key]:
                queue.remove(prompt)
                slot = prompt.slot if prompt.slot >= 0 else slot
        if slot is not None:
            self._free.append(slot)
        return slot
