"""Whoever has requests decoded: a call of `generate`, a stream, the queue of a server."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from medusa_kit.infer.decode.request import Emitted, Request
from medusa_kit.infer.decode.step_thread import End


class Caller:
    """Its requests are decoded beside those of others, at most `max_rows` in a batch at once.

    `max_pause`: seconds for which reading prompts may hold up its requests between two steps; None:
    until all have been read. Everything but `has_left` belongs to the thread that makes
    the steps once a request of it is there.
    """

    def __init__(self, max_rows: int, max_pause: float | None = None) -> None:
        self.max_rows, self.max_pause = max_rows, max_pause
        self.requests: set[Request] = set()  # that have not left yet
        self.num_steps = 0  # forwards over trees, of batches that it had requests in
        self.is_wanted = True  # whether steps are made of its requests now
        self.has_left = False  # whether nobody waits for its requests any more
        # Of its thread: the dtype of autocast, if it is on, and how many threads torch uses.
        self.autocast: torch.dtype | None = None
        self.num_threads = torch.get_num_threads()

    def tell(self, emitted: Emitted, finished: list[Request]) -> None:
        """What a step emitted of its requests, and which of them have left with it."""
        finished = [one for one in finished if one in self.requests]
        self.requests.difference_update(finished)
        self.hear(emitted, finished)

    def hear(self, emitted: Emitted, finished: list[Request]) -> None:
        """What `tell` tells, in the thread that makes the steps, which goes on after this."""


class Waiting(Caller):
    """A call in another thread, which waits for its end; with `each_step`, for each step.

    A step is then made only while it waits: whoever reads on slowly, or not at all, finds the
    request where it was. `note`: called with what a step emitted; what it returns is read.
    """

    def __init__(
        self,
        max_rows: int,
        each_step: bool = False,
        note: Callable[[Emitted], Any] = lambda emitted: emitted,
    ) -> None:
        super().__init__(max_rows)
        self._each_step, self._note = each_step, note
        self.news: SimpleQueue[Any] = SimpleQueue()  # what was noted of each step, then End

    def hear(self, emitted: Emitted, finished: list[Request]) -> None:
        if emitted and self._each_step:
            self.is_wanted = False
            self.news.put(self._note(emitted))
        failed = next((one for one in finished if one.error is not None), None)
        if failed is not None:
            error, failed.error = failed.error, None
            self.end(error)
        elif finished and not self.requests:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        self.has_left = True
        self.news.put(End(error))

    def want(self) -> None:
        """In the thread that makes the steps: somebody waits for the next one."""
        self.is_wanted = True
