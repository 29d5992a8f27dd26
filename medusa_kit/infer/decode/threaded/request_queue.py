"""Requests that any number of threads submit to a scheduler, and read or cancel there.

What the scheduler's thread must do of it is handed to that as a call. Cancelling takes no lock, so
that it can be done wherever Python collects garbage.
"""

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from medusa_kit import console
from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.errors import ClosedError, ConfigError, Live, QueueFullError
from medusa_kit.infer.decode.batches import BatchStats
from medusa_kit.infer.decode.caller import Caller
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Emitted, FailAlone, Request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.decode.threaded.submission import OnTokens, Submission, check_process
from medusa_kit.infer.memory import device_memory_error, is_device_lost
from medusa_kit.locks import SharedLock

MAX_WAITING = 256


class Draining(Live):
    """Used in `with`, it is closed at the end: what is under way ends first, or is cancelled where
    something was raised."""

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(drain=error is None)


class RequestQueue(Caller, Draining):
    """Has requests decoded by `scheduler`, at most `max_rows` in a batch at once; `most_waiting`
    others may wait. `max_pause`: as in `Caller`. `watched`: layers that drafters may read.

    Use it in `with`, or `close` it: its batch stays until then, or until the end of the process,
    where requests are cancelled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        max_rows: int,
        max_pause: float | None = None,
        most_waiting: int = MAX_WAITING,
        watched: Sequence[int] = (),
    ) -> None:
        super().__init__(max_rows, max_pause)
        self._scheduler, self._max_requests = scheduler, max_rows + most_waiting
        self._stats = BatchStats()
        self._lock = SharedLock()  # for what follows
        self._submissions: dict[Request, Submission] = {}  # that have not ended
        self._closed: str | None = None  # why no more are taken
        self._ended = threading.Event()  # once none is taken and none is left
        self._pid = os.getpid()
        try:
            scheduler.prepare(self, watched)
        except BaseException:  # nobody has it to close
            self.drop()
            raise

    def submit(
        self,
        request: Request,
        drafter: Drafter,
        on_tokens: OnTokens | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> Submission:
        """Let a request in. Those with the same drafter draft together; it belongs to the
        scheduler's thread now.

        `on_tokens` is called in that thread with the tokens of each step, and at the end with none:
        it should only pass them on, as by `loop.call_soon_threadsafe`. Where it raises, the request
        fails. `at_end` is called there once the request has ended, and must not raise.
        Raises QueueFullError, ClosedError after `close` and in forked children, ConfigError for a
        request that is there already.
        """
        check_process(self._pid)
        submission = Submission(request, drafter, self, on_tokens, at_end)
        with self._lock:
            if self._closed is not None:
                raise ClosedError(self._closed, hint="make another batch")
            if (count := len(self._submissions)) >= self._max_requests:
                raise QueueFullError(
                    f"the batch has {count} requests; expected at most {self._max_requests}, "
                    "those that wait included",
                    hint="ask again later, or let more wait (most_waiting)",
                )
            if request in self._submissions:
                raise ConfigError(
                    "the request is in the batch already", hint="make a Request for each request"
                )
            self._submissions[request] = submission  # before the thread may hear of it
            try:
                self._scheduler.thread.hand(lambda: self._add(submission))
            except BaseException:  # Ctrl-C may come before it is handed over or after
                self._scheduler.thread.hand_later(lambda: self._withdraw(submission))
                raise
        return submission

    def cancel(self, submission: Submission) -> None:
        """End its request within a step. Takes no lock."""
        self._scheduler.thread.hand_later(submission.request.cancel)

    def check_device(self, error: Exception) -> None:
        """End where `error`, of whatever was made for a request, says that the device is lost."""
        if is_device_lost(error):
            self._scheduler.thread.hand(lambda: self._die(error))

    @property
    def stats(self) -> BatchStats:
        last = self._stats
        return replace(last, waiting=max(0, len(self._submissions) - last.running - last.reading))

    @property
    def ended(self) -> str | None:
        """Why no more requests are taken, or None."""
        return self._closed

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in the scheduler's thread."""
        return self._scheduler.thread.is_current

    def drop(self) -> None:
        """End once its requests have. Takes no lock."""
        self._scheduler.thread.hand_later(lambda: self._close("the batch has been dropped"))

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, and wait until those that are there have ended (`drain`) or have
        been cancelled, for so many seconds at most."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = self._closed or "the batch has been closed"
        with contextlib.suppress(ClosedError):  # the process is ending
            self._scheduler.thread.hand(lambda: self._close(self._closed, cancel=not drain))
            if not self.is_current:
                self._ended.wait(timeout)

    def _add(self, submission: Submission) -> None:
        request = submission.request
        with FailAlone(request):
            if request.finish_reason is None and not self.has_left:
                self._scheduler.batches.add(request, submission.drafter, self)
                return
        self._end(submission)

    def _withdraw(self, submission: Submission) -> None:
        """Forget a request whose caller has no `Submission` of it."""
        submission.forget_caller()
        if submission.request in self.requests:
            submission.request.cancel()
        else:
            self._end(submission)

    def hear(self, emitted: Emitted, finished: list[Request]) -> None:
        for request, tokens in emitted:
            with FailAlone(request):
                self._submissions[request].push(tokens)
        self._stats = self._scheduler.batches.stats_of(self)
        lost: Exception | None = None
        for request in finished:
            if request.error is not None and is_device_lost(request.error):
                lost = request.error
            self._end(self._submissions[request])
        if lost is not None:
            self._die(lost)

    def _end(self, submission: Submission) -> None:
        request, drafter = submission.request, submission.drafter
        if request.error is not None:
            request.error = self._explained(request.error, submission)
        with contextlib.suppress(Exception):  # a drafter that failed may not be able to tell
            submission.drafter_name, submission.drafter_notes = drafter.describe(), drafter.notes
        with self._lock:
            self._submissions.pop(request, None)
        try:
            submission.end()
        except Exception as error:
            console.warn(f"the end callback of a request failed: {error}")
        self._leave_if_done()

    def _explained(self, error: Exception, submission: Submission) -> Exception:
        """The error for the caller's thread, which may keep it for long."""
        if is_out_of_memory(error):
            base, nodes = self._scheduler.verifier.base, submission.drafter.num_nodes
            num_positions = submission.request.num_positions + nodes - 1
            return device_memory_error(base, 1, nodes, num_positions, error)
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        return error

    def _close(self, why: str | None, cancel: bool = False) -> None:
        """In the scheduler's thread."""
        with self._lock:
            self._closed = self._closed or why
        if cancel:
            for request in self._submissions:
                request.cancel()
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._closed is not None and not self._submissions:
            self.has_left = True  # its batch goes before the next step
            self._ended.set()

    def _die(self, error: BaseException) -> None:
        """Where the device is lost, no request can be answered any more."""
        with self._lock:
            self._closed = f"the batch has ended: {type(error).__name__}: {error}"
            remaining, self._submissions = list(self._submissions.values()), {}
        console.warn(self._closed)
        why = ClosedError(self._closed, hint="make another batch")
        why.__cause__ = error
        self.requests.clear()
        for submission in remaining:
            submission.request.fail(why)
            with contextlib.suppress(Exception):
                submission.end()
        self._leave_if_done()
