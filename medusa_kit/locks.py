"""Locks for what several threads share, usable in a forked child too."""

import os
import threading
from types import TracebackType
from typing import Any
from weakref import WeakSet


class SharedLock:
    """A reentrant lock, for use in `with`.

    A thread that holds a lock while another one forks does not exist in the child, so the child
    gets all locks open. Copies and pickles of an object that owns one get a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedLock, ()

    def reopen(self) -> None:
        self._lock = threading.RLock()


_locks: WeakSet[SharedLock] = WeakSet()
_making = SharedLock()


ATTRIBUTE = "medusa_kit_lock"


def lock_of(owner: Any) -> SharedLock:
    """The lock that belongs to an object which several others may wrap, such as a model: held by
    the thread that runs it."""
    lock: SharedLock | None = vars(owner).get(ATTRIBUTE)
    if lock is None:
        with _making:
            lock = vars(owner).setdefault(ATTRIBUTE, SharedLock())
    return lock


def _reopen_all() -> None:
    for lock in list(_locks):
        lock.reopen()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_reopen_all)
