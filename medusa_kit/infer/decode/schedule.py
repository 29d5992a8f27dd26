"""Who waits, reads its prompt, or runs: the order of work in a batch that requests join and leave.

Plain Python, so that it can be followed, and tested, without a model. Requests are served in the
order in which they came. Prompts are read in pieces between steps, for a bounded time while other
requests run, which bounds the time between their tokens.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from medusa_kit.infer.decode.slots import Slot, Slots

MAX_PAUSE = 0.1  # seconds for which prompts hold up answers of others, unless these ask for another
MIN_TOKENS = 16  # tokens of prompts that are read between two steps in any case: each gets on
NEWEST = 0.5  # weight of the newest measurement


class Scheduled(Protocol):
    """What is seen here of a request."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    slot: Slot | None  # None while it waits, and once it has left
    num_read: int  # first tokens of its prompt that are cached, or are read now
    text: list[int]  # empty until it runs
    caller: Any  # Caller, if it has one


R = TypeVar("R", bound=Scheduled)
# (request, those that get a slot after it) -> (its slot, how many tokens of its prompt are cached
# there already, less than all of them)
Choose = Callable[[R, Sequence[R]], tuple[Slot, int]]


@dataclass(frozen=True)
class Piece(Generic[R]):
    """Tokens `start` to before `end` of a request's prompt, to be read into its slot."""

    request: R
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == len(self.request.prompt_ids)


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


class Schedule(Generic[R]):
    """`slots`: for requests that read their prompts or run, each in one of its own. `max_rows`: of
    them at once, at most. `max_pause`: seconds for which prompts may be read between two steps
    while requests run; None: until all have been read. `clock`: in seconds."""

    def __init__(
        self,
        slots: Slots,
        max_rows: int,
        max_pause: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.slots, self._clock = slots, clock
        self.max_rows, self._max_pause = max_rows, max_pause
        self._speed = None if max_pause is None else ReadingSpeed(max_pause)
        self.waiting: deque[R] = deque()
        self.served: list[R] = []  # those with a slot, in the order in which they got it

    @property
    def requests(self) -> list[R]:
        """All that wait, read or run."""
        return [*self.served, *self.waiting]

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt may be read now."""
        if self.waiting:
            return True
        return any(one.num_read < len(one.prompt_ids) for one in self.served)

    @property
    def running(self) -> list[R]:
        """Those whose prompts have been read."""
        return [request for request in self.served if request.text]

    def use(self, max_rows: int, max_pause: float | None) -> None:
        """Go on with these limits."""
        self.max_rows = max_rows
        if self._max_pause != max_pause:
            self._max_pause = max_pause
            self._speed = None if max_pause is None else ReadingSpeed(max_pause)

    def add(self, request: R) -> None:
        self.waiting.append(request)

    def admit(self, choose: Choose[R]) -> list[R]:
        """Give free slots to those that wait, which are returned."""
        admitted = list[R]()
        while self.waiting and (rows := self._num_free) and (following := self._next(rows)):
            request, *later = following
            self.waiting.remove(request)
            request.slot, request.num_read = choose(request, later)
            self.slots.free.remove(request.slot)
            self.served.append(request)
            admitted.append(request)
        return admitted

    def _next(self, count: int) -> list[R]:
        """Those that get the next `count` slots, none beyond its caller's limit."""
        if all(one.caller is None for one in self.waiting):
            return list(islice(self.waiting, count))
        rows = Counter(one.caller for one in self.served)
        found = list[R]()
        for request in self.waiting:
            caller = request.caller
            if caller is not None and rows[caller] >= caller.max_rows:
                continue
            rows[caller] += 1
            found.append(request)
            if len(found) == count:
                break
        return found

    @property
    def _num_free(self) -> int:
        """How many more may be served now."""
        return max(0, min(len(self.slots.free), self.max_rows - len(self.served)))

    def reading(self, max_tokens: int) -> Iterator[list[Piece[R]]]:
        """What to read before the next step, at most `max_tokens` at once: of the earliest prompt,
        then of those after it.

        Where none runs, a step is a call or what may be read while some run, whichever is more.
        """
        if (speed := self._speed) is None or self._max_pause is None:
            while pieces := self._pieces(max_tokens):
                yield pieces
            return
        started, read = self._clock(), 0
        remaining = speed.num_tokens if self.running else max(speed.num_tokens, max_tokens)
        try:
            while remaining > 0 and (pieces := self._pieces(min(max_tokens, remaining))):
                size = sum(piece.end - piece.start for piece in pieces)
                remaining, read = remaining - size, read + size
                yield pieces
                if self.running and self._clock() - started >= self._max_pause:
                    break
        finally:  # the caller may read no more for now
            if read:
                speed.record(read, self._clock() - started)

    def _pieces(self, max_tokens: int) -> list[Piece[R]]:
        pieces, remaining = list[Piece[R]](), max_tokens
        for request in self.served:
            if not remaining:
                break
            start = request.num_read
            end = min(len(request.prompt_ids), start + remaining)
            if end > start:
                pieces.append(Piece(request, start, end))
                remaining, request.num_read = remaining - (end - start), end
        return pieces

    def leave(self, request: R) -> None:
        """Forget a request, wherever it is. Its slot, if it has one, is freed by `Slots.leave`."""
        (self.waiting if request.slot is None else self.served).remove(request)
