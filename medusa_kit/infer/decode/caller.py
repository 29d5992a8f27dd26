"""Whoever has requests decoded: a call of `generate`, a stream, the thread of a server."""

from collections import deque
from collections.abc import Callable
from typing import Any

from medusa_kit.infer.decode.request import Emitted, Request


class Caller:
    """Its requests are decoded beside those of others, at most `max_rows` in a batch at once.

    A step that another thread makes may be one of its requests, too. `note` is called in that
    thread with what the step emitted of them, before the next one; what it returns, by default what
    was emitted, is among `news` until the caller takes it. `most_ahead`: news from which on its
    requests take part in no step until it takes some, since nobody may read on.
    `max_pause`: seconds for which reading prompts may hold up its requests between two steps; None:
    until all have been read. `has_thread`: whether a thread makes steps until its requests
    are done, whatever else happens.
    """

    def __init__(
        self,
        max_rows: int,
        max_pause: float | None = None,
        note: Callable[[Emitted], Any] | None = None,
        most_ahead: int | None = None,
        has_thread: bool = False,
    ) -> None:
        self.max_rows, self.max_pause, self.note = max_rows, max_pause, note
        self.most_ahead, self.has_thread = most_ahead, has_thread
        self.num_requests = 0  # that have not left yet
        self.news: deque[Any] = deque()
        self.finished: deque[Request] = deque()  # that have left and were not taken yet
        self.cancelled: deque[Request] = deque()  # to be ended before the next step
        self.is_held = False  # whether no step is made for it until it takes its news
        self.has_left = False  # whether nobody waits for its requests any more
        self.waits = False  # whether a thread waits for news of it, or makes a step for it

    def tell(self, emitted: Emitted, finished: list[Request]) -> None:
        """What a step emitted of its requests, and which of them have left with it."""
        if emitted:
            self.news.append(emitted if self.note is None else self.note(emitted))
            if self.most_ahead is not None:
                self.is_held = len(self.news) >= self.most_ahead
        self.finished += finished
        self.num_requests -= len(finished)

    def take_news(self) -> Any:
        """The oldest, of which there is one."""
        news = self.news.popleft()
        self.is_held = False
        return news

    def leave(self) -> None:
        """Nobody waits for its requests any more. Takes no lock and computes nothing, so that it
        can be called wherever Python collects garbage; they end before the next step."""
        self.has_left = True

    def raise_error(self) -> None:
        """Raise the error of a request that failed and has left since the last call."""
        while self.finished:
            request = self.finished.popleft()
            error, request.error = request.error, None
            try:
                if error is not None:
                    raise error
            finally:  # else error and request refer to each other, and hold what the step computed
                del error
