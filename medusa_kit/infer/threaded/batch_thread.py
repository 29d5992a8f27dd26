"""A thread that owns a batch: any other thread submits rows, and reads or cancels them.

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
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Literal, NamedTuple

import torch

from medusa_kit import console
from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.errors import ClosedError, ConfigError, QueueFullError
from medusa_kit.infer.batch import Batch
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.memory import device_memory_error, is_device_lost
from medusa_kit.infer.request import Emitted, FailAlone, Request
from medusa_kit.infer.threaded.submission import OnTokens, Submission, Ticket, check_process
from medusa_kit.infer.turns import Turns
from medusa_kit.locks import SharedLock

MAX_WAITING = 256
PATIENCE = 30.0  # seconds that the end of the process waits for the step under way


@dataclass(frozen=True)
class BatchStats:
    """How a batch stood after its last step."""

    running: int = 0  # rows
    reading: int = 0  # rows whose prompts are being read
    waiting: int = 0  # rows without a place
    steps: int = 0  # forwards over trees so far
    nodes: int = 0  # in the last of them
    held_prefixes: int = 0  # places of no row that hold the text of an earlier one
    cached_tokens: int = 0  # in them


class BatchThread:
    """Starts a thread that owns `batch` from now on; at most `most_waiting` rows wait for a place.

    Use it in `with`, or `close` it. One that is dropped ends when its rows have; at the end of the
    process rows are cancelled.
    """

    def __init__(self, batch: Batch | Turns, most_waiting: int = MAX_WAITING) -> None:
        self._worker = _Worker(batch, batch.max_rows + most_waiting)
        self._pid = os.getpid()
        # A daemon: other threads are waited for before the process ends, this one is ended then.
        self._thread = threading.Thread(
            target=self._worker.run, name="medusa-kit batch", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._worker.inbox.put, _Message("drain")).atexit = False
        _threads.add(self)

    def submit(
        self,
        row: Request,
        drafter: Drafter,
        on_tokens: OnTokens | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> Submission:
        """Let a row in. Rows with the same drafter draft together; it belongs to the thread now.

        `on_tokens` is called in the batch's thread with the tokens of each step, and at the end
        with none: it should only pass them on, as by `loop.call_soon_threadsafe`. Where it raises,
        the row fails. `at_end` is called there once the row has ended, and must not raise.
        Raises QueueFullError, ClosedError after `close` and in forked children, ConfigError for a
        row that is there already.
        """
        check_process(self._pid)
        ticket = Ticket(row, drafter, on_tokens, at_end)
        self._worker.take(ticket)
        return Submission(ticket, self._worker.cancel, self._in_own_thread)

    def check_device(self, error: Exception) -> None:
        """End where `error`, of whatever was made for a row, says that the device is lost."""
        if is_device_lost(error):
            self._worker.inbox.put(_Message("lost", error=error))

    @property
    def stats(self) -> BatchStats:
        return self._worker.stats

    @property
    def ended(self) -> str | None:
        """Why no more rows are taken, or None."""
        return self._worker.closed

    def _in_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more rows, and wait until those that are there have ended (`drain`) or have been
        cancelled, for so many seconds at most."""
        if os.getpid() != self._pid:
            return
        self._worker.close(drain)
        if not self._in_own_thread():
            self._thread.join(timeout)

    def __enter__(self) -> "BatchThread":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(drain=error is None)


class _Message(NamedTuple):
    what: Literal["add", "cancel", "drain", "stop", "lost"]
    ticket: Ticket | None = None
    error: Exception | None = None


class _Worker:
    """What the thread runs. It does not keep the BatchThread alive."""

    def __init__(self, batch: Batch | Turns, most_rows: int) -> None:
        self.batch, self.most_rows = batch, most_rows
        self.inbox: SimpleQueue[_Message] = SimpleQueue()
        self._last = BatchStats()
        self._lock = SharedLock()  # for what follows
        self._tickets: dict[Request, Ticket] = {}  # of rows that have not ended
        self._closed: str | None = None  # why no more are taken
        self._lost: Exception | None = None  # the error by which the device was lost

    @property
    def stats(self) -> BatchStats:
        last = self._last
        return replace(last, waiting=max(0, len(self._tickets) - last.running - last.reading))

    @property
    def closed(self) -> str | None:
        return self._closed

    def take(self, ticket: Ticket) -> None:
        with self._lock:
            if self._closed is not None:
                raise ClosedError(self._closed, hint="make another batch")
            if len(self._tickets) >= self.most_rows:
                raise QueueFullError(
                    f"the batch has {len(self._tickets)} requests; expected at most "
                    f"{self.most_rows}, those that wait included",
                    hint="ask again later, or let more wait (most_waiting)",
                )
            if ticket.row in self._tickets:
                raise ConfigError(
                    "the request is in the batch already", hint="make a Request for each request"
                )
            self._tickets[ticket.row] = ticket
            self.inbox.put(_Message("add", ticket))

    def cancel(self, ticket: Ticket) -> None:
        self.inbox.put(_Message("cancel", ticket))

    def close(self, drain: bool) -> None:
        with self._lock:
            self._closed = self._closed or "the batch has been closed"
        self.inbox.put(_Message("drain" if drain else "stop"))

    def run(self) -> None:
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
            idle = not self._tickets and self._closed is None
            try:
                message = self.inbox.get(block=idle)
            except Empty:
                return bool(self._tickets)
            self._heed(message)

    def _heed(self, message: _Message) -> None:
        ticket = message.ticket
        if message.error is not None:
            raise message.error
        if ticket is None:
            with self._lock:
                self._closed = self._closed or "the batch has been dropped"
            if message.what == "stop":
                for row in self._tickets:
                    self.batch.cancel(row)
        elif message.what == "cancel":
            self.batch.cancel(ticket.row)
        else:
            with FailAlone(ticket.row):
                if ticket.row.finish_reason is None:
                    self.batch.add(ticket.row, ticket.drafter)
                    return
            self._end(ticket)

    def _step(self) -> None:
        batch = self.batch
        emitted: Emitted = []
        try:
            emitted = batch.step()
        except Exception as error:  # no row is to blame for it: the thread goes on
            batch.fail(error)
            self._check_device(error)
        for row, tokens in emitted:
            with FailAlone(row):
                self._tickets[row].push(tokens)
        batch.remove_finished()
        self._tell()
        for row in batch.finished:
            if row.error is not None:
                self._check_device(row.error)
            self._end(self._tickets[row])
        if self._lost is not None:
            raise self._lost

    def _check_device(self, error: Exception) -> None:
        """Where it is lost the thread ends after the step, once those who wait have been told."""
        if self._lost is None and is_device_lost(error):
            self._lost = error

    def _tell(self) -> None:
        batch = self.batch
        held = batch.cached_tokens
        self._last = BatchStats(
            batch.num_running,
            batch.num_reading,
            steps=batch.num_steps,
            nodes=batch.num_nodes,
            held_prefixes=len(held),
            cached_tokens=sum(held),
        )

    def _end(self, ticket: Ticket) -> None:
        row = ticket.row
        if row.error is not None:
            row.error = self._explained(row.error, ticket)
        with contextlib.suppress(Exception):  # a drafter that failed may not be able to tell
            ticket.drafter_name, ticket.drafter_notes = (
                ticket.drafter.describe(),
                ticket.drafter.notes,
            )
        with self._lock:
            self._tickets.pop(row, None)
        try:
            ticket.end()
        except Exception as error:
            console.warn(f"nobody heard of the end of a request: {error}")

    def _explained(self, error: Exception, ticket: Ticket) -> Exception:
        """The error for the caller's thread, which may keep it for long."""
        if is_out_of_memory(error):
            base, row, nodes = self.batch.verifier.base, ticket.row, ticket.drafter.num_nodes
            return device_memory_error(base, 1, nodes, row.num_slots + nodes - 1, error)
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        return error

    def _die(self, error: BaseException) -> None:
        """Nobody may wait for ever."""
        with self._lock:
            self._closed = f"the batch's thread has ended: {type(error).__name__}: {error}"
            left, self._tickets = list(self._tickets.values()), {}
        console.warn(self._closed)
        why = ClosedError(self._closed, hint="make another batch")
        why.__cause__ = error
        for ticket in left:
            ticket.row.fail(why)
            with contextlib.suppress(Exception):
                ticket.end()


_threads: weakref.WeakSet[BatchThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """While the modules that steps need are there."""
    for thread in list(_threads):
        thread.close(drain=False, timeout=PATIENCE)
