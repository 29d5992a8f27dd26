"""The thread that makes a scheduler's steps. It is there while there is something to do.

Whoever has requests decoded only waits, so Ctrl-C cuts off a wait and never a step. Work reaches
the thread as calls, which it makes between two steps. Handing one over as it is takes no lock, so
that it can be done wherever Python collects garbage.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NoReturn, Protocol
from weakref import WeakSet, finalize, ref

import torch

from medusa_kit import console
from medusa_kit.errors import ClosedError, ConfigError, Live
from medusa_kit.locks import SharedLock

LINGER = 1.0  # seconds without work after which a thread ends; to start one takes 0.1 ms
LAST_WAIT = 5.0  # of a daemon thread for the end of the process, which comes sooner
PATIENCE = 30.0  # seconds that the end of the process waits for the step under way
ENDING = "the process is ending"
Call = Callable[[], None]


class Steps(Protocol):
    """What the thread owns."""

    def step(self) -> bool:
        """Whether there was something to do."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether somebody may yet let go of something."""
        ...

    def end(self, error: Exception) -> None:
        """End everything that somebody waits for."""
        ...

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads that wait."""
        ...


class End:
    """That nothing more comes. `error`: what ended it, if anything did."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def raise_error(self) -> None:
        error, self.error = self.error, None
        try:
            if error is not None:
                raise_here(error)
        finally:  # else error and frame refer to each other, and hold what the step computed
            del error


class StepThread(Live):
    """Makes the steps of `steps`, and the calls that are handed to it, one after another."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._lock = SharedLock()  # for the thread, and whether one is needed
        self._begin()
        _threads.add(self)

    def _begin(self) -> None:
        self._inbox: SimpleQueue[Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        finalize(self, self._inbox.put, None).atexit = False

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return self._thread is threading.current_thread()

    @property
    def is_asked(self) -> bool:
        """Whether something was handed to it that it has not begun with."""
        return not self._inbox.empty()

    def refuse_within(self) -> None:
        """Raise ConfigError in the thread itself, which would wait for itself."""
        if self.is_current:
            raise ConfigError(
                "an answer was waited for within a step of another one",
                hint="ask in another thread: drafters, hooks and `on_tokens` run within a step",
            )

    def hand(self, call: Call) -> None:
        """Have this called in the thread. It must not raise. Raises ClosedError where no thread can
        be started."""
        with self._lock:
            if _ends.is_set():
                raise_here(ClosedError(ENDING, hint="ask before the process ends"))
            if self._thread is None or not self._thread.is_alive():
                self._start()
            self._inbox.put(call)  # not before there is a thread: else a later one makes it

    def hand_later(self, call: Call) -> None:
        """Have this called once the thread runs. Takes no lock."""
        self._inbox.put(call)

    def hand_and_wait(self, call: Call) -> None:
        """Raises what the call raises. Ctrl-C ends the wait alone."""
        if self.is_current:
            return call()
        done = SimpleQueue[End]()

        def answer() -> None:
            end = End()
            try:
                call()
            except BaseException as error:
                end.error = error
            done.put(end)

        self.hand(answer)
        return done.get().raise_error()

    def _start(self) -> None:
        # A daemon: other threads are waited for before the process ends, this one is ended then.
        thread = threading.Thread(
            target=_run, args=(ref(self), self._inbox), name="medusa-kit steps", daemon=True
        )
        self._thread = thread
        try:
            thread.start()
        except RuntimeError as error:  # too many, or the interpreter is ending
            self._thread = None
            raise ClosedError(
                f"no thread can be started: {error}", hint="end other threads, or ask earlier"
            ) from error

    def may_end(self) -> bool:
        """In the thread: whether nothing was handed to it since it had nothing to do."""
        with self._lock:
            if self.is_current and (self._steps.in_use or not self._inbox.empty()):
                return False
            if self.is_current:
                self._thread = None
            return True

    def work(self, call: Call | None) -> bool:
        """In the thread: make a call, then steps until there is nothing to do. Returns whether to
        go on."""
        with self._lock:
            if not self.is_current:  # Ctrl-C came as it began, and another one was started
                self._inbox.put(call)
                return False
        while call is not None:
            call()
            while self._inbox.empty():
                if not self._steps.step():
                    return True
            call = self._inbox.get()  # nobody else reads it
        return False

    def die(self, error: BaseException) -> None:
        """Nobody may wait for ever. The next call starts another thread."""
        console.warn(f"the thread that makes steps has ended: {type(error).__name__}: {error}")
        why = ClosedError(f"a step has ended in {type(error).__name__}: {error}", hint="ask again")
        why.__cause__ = error
        with self._lock:
            self._thread = None
        self._steps.end(why)
        with self._lock:
            if not (self._inbox.empty() or _ends.is_set()):
                self._start()

    def stop(self, timeout: float) -> None:
        """At the end of the process: end all answers, after the step under way."""
        with self._lock:
            thread = self._thread
            self._inbox.put(lambda: self._steps.end(ClosedError(ENDING)))
            self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def after_fork(self) -> None:
        self._begin()  # another thread may have been about to read the inbox
        self._steps.after_fork()


def raise_here(error: BaseException) -> NoReturn:
    """Raise what ended an answer. A daemon thread that the end of the process cuts off ends without
    a word, as any does that Python cuts off."""
    if _ends.is_set() and isinstance(error, ClosedError) and threading.current_thread().daemon:
        # Within Python's own wait, not within torch, which ends the process where Python cuts off a
        # thread that is in it.
        time.sleep(LAST_WAIT)
        raise SystemExit from error
    try:
        raise error
    finally:  # else error and frame refer to each other, and hold what the step computed
        del error


def _run(thread: "ref[StepThread]", inbox: "SimpleQueue[Call | None]") -> None:
    """Without holding the scheduler while there is nothing to do, so that it can be freed."""
    with torch.inference_mode():
        while (owner := thread()) is not None and owner.is_current:  # else another one has begun
            del owner
            waited, call = False, None
            try:
                call = inbox.get(timeout=LINGER)
            except Empty:
                waited = True
            if (owner := thread()) is None:
                return
            try:
                if owner.may_end() if waited else not owner.work(call):
                    return
            except BaseException as error:
                owner.die(error)
                return
            finally:
                del owner, call


_threads: WeakSet[StepThread] = WeakSet()
_ends = threading.Event()  # since the process ends


@atexit.register
def _stop_all() -> None:
    """While the modules that steps need are there."""
    _ends.set()
    for thread in list(_threads):
        thread.stop(PATIENCE)


def _after_fork() -> None:
    for thread in list(_threads):
        thread.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork)
