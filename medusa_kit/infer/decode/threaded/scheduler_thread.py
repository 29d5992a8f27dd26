"""A thread that owns a scheduler: any other thread submits requests, and reads or cancels them.

Everything reaches the thread as messages, which it reads between two steps. Sending one takes no
lock, so that it can be done wherever Python collects garbage.
"""

import atexit
import contextlib
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Literal, NamedTuple

import torch

from medusa_kit import console
from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.errors import ClosedError, ConfigError, Live, QueueFullError
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Emitted, FailAlone, Request
from medusa_kit.infer.decode.scheduler import BatchStats, Scheduler
from medusa_kit.infer.decode.threaded.submission import OnTokens, Submission, check_process
from medusa_kit.infer.memory import device_memory_error, is_device_lost
from medusa_kit.locks import SharedLock

MAX_WAITING = 256
PATIENCE = 30.0  # seconds that the end of the process waits for the step under way


class _Message(NamedTuple):
    kind: Literal["add", "cancel", "drain", "stop", "lost"]
    submission: Submission | None = None
    error: Exception | None = None


class SchedulerThread(Live):
    """Starts a thread that owns `scheduler` from now on; at most `most_waiting` requests wait for a
    slot.

    Use it in `with`, or `close` it: it runs until then, or until the end of the process, where
    requests are cancelled.
    """

    def __init__(self, scheduler: Scheduler, most_waiting: int = MAX_WAITING) -> None:
        self._scheduler, self._max_requests = scheduler, scheduler.max_rows + most_waiting
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._stats = BatchStats()
        self._lock = SharedLock()  # for what follows
        self._submissions: dict[Request, Submission] = {}  # that have not ended
        self._closed: str | None = None  # why no more are taken
        self._lost: Exception | None = None  # the error by which the device was lost
        self._pid = os.getpid()
        # A daemon: other threads are waited for before the process ends, this one is ended then.
        self._thread = threading.Thread(target=self._run, name="medusa-kit batch", daemon=True)
        self._thread.start()
        _threads.add(self)

    def submit(
        self,
        request: Request,
        drafter: Drafter,
        on_tokens: OnTokens | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> Submission:
        """Let a request in. Those with the same drafter draft together; it belongs to the thread
        now.

        `on_tokens` is called in the thread with the tokens of each step, and at the end with none:
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
            self._submissions[request] = submission
            self._inbox.put(_Message("add", submission))
        return submission

    def cancel(self, submission: Submission) -> None:
        """End its request within a step."""
        self._inbox.put(_Message("cancel", submission))

    def check_device(self, error: Exception) -> None:
        """End where `error`, of whatever was made for a request, says that the device is lost."""
        if is_device_lost(error):
            self._inbox.put(_Message("lost", error=error))

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
        """Whether the caller runs in it."""
        return threading.current_thread() is self._thread

    def drop(self) -> None:
        """End once its requests have. Takes no lock."""
        self._inbox.put(_Message("drain"))

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, and wait until those that are there have ended (`drain`) or have
        been cancelled, for so many seconds at most."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = self._closed or "the batch has been closed"
        self._inbox.put(_Message("drain" if drain else "stop"))
        if not self.is_current:
            self._thread.join(timeout)

    def __enter__(self) -> "SchedulerThread":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(drain=error is None)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._receive():
                    self._step()
        except BaseException as error:
            self._die(error)

    def _receive(self) -> bool:
        """Read the messages that are there, or wait for one where there is nothing to do; False at
        the end."""
        while True:
            idle = not self._submissions and self._closed is None
            try:
                message = self._inbox.get(block=idle)
            except Empty:
                return bool(self._submissions)
            self._handle(message)

    def _handle(self, message: _Message) -> None:
        submission = message.submission
        if message.error is not None:
            raise message.error
        if submission is None:
            with self._lock:
                self._closed = self._closed or "the batch has been dropped"
            if message.kind == "stop":
                for request in self._submissions:
                    request.cancel()
        elif message.kind == "cancel":
            submission.request.cancel()
        else:
            with FailAlone(submission.request):
                if submission.request.finish_reason is None:
                    self._scheduler.add(submission.request, submission.drafter)
                    return
            self._end(submission)

    def _step(self) -> None:
        emitted: Emitted = []
        try:
            emitted = self._scheduler.step()
        except Exception as error:  # no request is to blame for it: the thread goes on
            self._scheduler.fail(error)
            self._note_lost_device(error)
        for request, tokens in emitted:
            with FailAlone(request):
                self._submissions[request].push(tokens)
        finished = self._scheduler.take_finished()
        self._stats = self._scheduler.stats
        for request in finished:
            if request.error is not None:
                self._note_lost_device(request.error)
            self._end(self._submissions[request])
        if self._lost is not None:
            raise self._lost

    def _note_lost_device(self, error: Exception) -> None:
        """Where it is lost the thread ends after the step, once those who wait have been told."""
        if self._lost is None and is_device_lost(error):
            self._lost = error

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
            console.warn(f"nobody heard of the end of a request: {error}")

    def _explained(self, error: Exception, submission: Submission) -> Exception:
        """The error for the caller's thread, which may keep it for long."""
        if is_out_of_memory(error):
            base, nodes = self._scheduler.verifier.base, submission.drafter.num_nodes
            num_positions = submission.request.num_positions + nodes - 1
            return device_memory_error(base, 1, nodes, num_positions, error)
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        return error

    def _die(self, error: BaseException) -> None:
        """Nobody may wait for ever."""
        with self._lock:
            self._closed = f"the batch's thread has ended: {type(error).__name__}: {error}"
            remaining, self._submissions = list(self._submissions.values()), {}
        console.warn(self._closed)
        why = ClosedError(self._closed, hint="make another batch")
        why.__cause__ = error
        for submission in remaining:
            submission.request.fail(why)
            with contextlib.suppress(Exception):
                submission.end()


_threads: weakref.WeakSet[SchedulerThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """While the modules that steps need are there."""
    for thread in list(_threads):
        thread.close(drain=False, timeout=PATIENCE)
