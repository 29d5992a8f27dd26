"""Whose turn it is to work on the batches of a scheduler: one thread's at a time."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn
from weakref import WeakSet, ref

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.caller import Caller
from medusa_kit.locks import SharedLock
from medusa_kit.no_gradients import no_gradients

PATIENCE = 0.05  # seconds until a thread that waits looks again


class Turn:
    """`with turn.taken()`: the batches are the caller's. Threads that want this come before those
    that ask to make a step. While one works it holds no lock.

    The turn belongs to an object that lives as long as the call that works: Ctrl-C may come at any
    line, also where the turn is given back, and then it ends with that object.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(SharedLock())
        self._owner: ref[Taken] | None = None
        self._wanted: WeakSet[Taken] = WeakSet()  # that wait in `with`

    def taken(self) -> "Taken":
        return Taken(self)

    def take(self, taken: "Taken") -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None and owner.thread == taken.thread:
            _refuse()
        with self._changed:
            self._wanted.add(taken)
            while not self.is_free:
                self._changed.wait(PATIENCE)
            self._owner = ref(taken)
            self._wanted.discard(taken)

    def to_step(self, taken: "Taken", caller: Caller, may_step: Callable[[Caller], bool]) -> bool:
        """Take the turn for a step; False where the caller has been served meanwhile, and has no
        turn. `give_back` follows. `may_step`: asked in the main thread. Raises ConfigError where
        this thread is at work already."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and owner.thread == taken.thread:
            _refuse()
        in_main = taken.thread == threading.main_thread().ident
        with self._changed:
            while not (caller.news or caller.finished) and caller.num_requests:
                owner = None if self._owner is None else self._owner()
                if owner is None and not self._wanted and (not in_main or may_step(caller)):
                    self._owner = ref(taken)
                    return True
                self._changed.wait(PATIENCE)
        return False

    @property
    def is_free(self) -> bool:
        return self._owner is None or self._owner() is None

    def give_back(self, taken: "Taken") -> None:
        """End the turn, if it is this one."""
        if self._owner is not None and self._owner() is taken:
            with self._changed:
                self._owner = None
                self._changed.notify_all()

    def reopen(self) -> bool:
        """In a forked child: nobody is at work. Returns whether a thread was."""
        was_at_work, self._owner, self._wanted = not self.is_free, None, WeakSet()
        return was_at_work


class Taken:
    """A thread's turn, which it may have to wait for."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self.thread = turn, threading.get_ident()

    def __enter__(self) -> None:
        self._turn.take(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._turn.give_back(self)


def _refuse() -> NoReturn:
    raise ConfigError(
        "an answer was asked for within a step of another one, in the same thread",
        hint="ask between two steps, or in another thread",
    )


def undisturbed(work: Callable[[], None]) -> None:
    """Do this where no signal is handled, if it is of what other threads use too: in the main
    thread Ctrl-C may be raised at any line, so there it waits until another one has done it."""
    if threading.get_ident() != threading.main_thread().ident or threading.active_count() == 1:
        return work()
    raised = list[BaseException]()

    def try_it() -> None:
        try:
            no_gradients(work)()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=try_it, name="medusa-kit join")
    thread.start()
    while thread.is_alive():
        try:
            thread.join()
        except BaseException as error:
            raised.append(error)
    if raised:
        raise raised[-1]
    return None
