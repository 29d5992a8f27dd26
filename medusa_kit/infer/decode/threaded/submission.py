"""A request given to a scheduler: what it has emitted, read or waited for in other threads."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from medusa_kit.errors import ClosedError, ConfigError, Live
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Emission, Request, emission
from medusa_kit.infer.decode.step_thread import raise_here

OnTokens = Callable[[list[int]], None]


class Queue(Protocol):
    """Where a request was submitted (request_queue.py)."""

    @property
    def is_current(self) -> bool: ...

    def cancel(self, submission: "Submission") -> None: ...


class Submission(Live):
    """Iterate over it for what each step emits, in any thread; each emission is read once. The end
    raises what the request failed of."""

    def __init__(
        self,
        request: Request,
        drafter: Drafter,
        queue: Queue,
        on_tokens: OnTokens | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self.request = request  # belongs to the thread until `done`
        self.drafter, self.on_tokens = drafter, on_tokens
        self.done = False  # whether it has ended: finished, cancelled or failed
        self.drafter_name = ""  # at the end, with statistics that all share that drafted with it
        self.drafter_notes: list[str] = []
        self._queue, self._at_end, self._pid = queue, at_end, os.getpid()
        self._changed = threading.Condition()
        self._emissions: deque[Emission] = deque()

    def push(self, tokens: list[int]) -> None:
        """In the thread: what a step emitted."""
        with self._changed:
            self._emissions.append(emission(self.request, tokens))
            self._changed.notify_all()
        self._tell(tokens)

    def end(self) -> None:
        """In the thread: nothing more comes."""
        if self._at_end is not None:
            self._at_end()
        with self._changed:
            self.done = True
            self._changed.notify_all()
        self._tell([])

    def _tell(self, tokens: list[int]) -> None:
        """What `on_tokens` raises is an Exception, whatever it is: the thread serves others too."""
        try:
            if self.on_tokens is not None:
                self.on_tokens(tokens)
        except Exception:
            raise
        except BaseException as error:  # such as SystemExit
            raise ClosedError(
                f"on_tokens was ended by {type(error).__name__}: {error}",
                hint="it should only pass tokens on",
            ) from error

    def forget_caller(self) -> None:
        """In the thread: nobody is to hear of it."""
        self.on_tokens = self._at_end = None

    @property
    def error(self) -> Exception | None:
        """What it failed of, once it is done."""
        return self.request.error if self.done else None

    def cancel(self) -> None:
        """End the request within a step; it keeps what it has emitted. From any thread."""
        if not self.done:
            self._queue.cancel(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, for so many seconds at most; whether it has come."""
        with self._waiting():
            return self._changed.wait_for(lambda: self.done, timeout)

    def result(self) -> Request:
        """The request, once it has ended. Raises what it failed of."""
        self.wait()
        if self.request.error is not None:
            raise_here(self.request.error)
        return self.request

    def take(self) -> list[Emission]:
        """What has been emitted and not been read yet, without a wait."""
        with self._changed:
            emissions = list(self._emissions)
            self._emissions.clear()
        return emissions

    def __iter__(self) -> Iterator[Emission]:
        while True:
            with self._waiting():
                self._changed.wait_for(lambda: self._emissions or self.done)
                emission = self._emissions.popleft() if self._emissions else None
            if emission is None:
                break
            yield emission
        self.result()

    def _waiting(self) -> threading.Condition:
        """The lock to take for a wait. Raises where the wait would never end."""
        check_process(self._pid)
        if self._queue.is_current and not self.done:
            raise ConfigError(
                "the batch's own thread cannot wait for one of its requests",
                hint="wait in another thread: `on_tokens` runs in the batch's",
            )
        return self._changed


def check_process(pid: int) -> None:
    """Raises ClosedError in a forked child, which has no thread of its parent's."""
    if os.getpid() != pid:
        raise ClosedError(
            f"the batch's thread is in process {pid}; this is process {os.getpid()}",
            hint="a forked process needs a batch of its own",
        )
