"""Locks for what several threads share, usable in a forked child too."""

import os
import threading
from collections.abc import Hashable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

# The type, not the function: in C, so that a signal cannot come between taking a lock and the
# `with` that gives it back.
_RLock: Any = type(threading.RLock())


class SharedLock(_RLock):
    """A reentrant lock, for use in `with`.

    A thread that holds a lock while another one forks does not exist in the child, so the child
    gets all locks open. Copies and pickles of an object that owns one get a new one.
    """

    def __init__(self) -> None:
        super().__init__()
        _locks.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedLock, ()


_locks: WeakSet[SharedLock] = WeakSet()


class KeyedLocks:
    """A lock for each key, there while somebody holds it or waits for it: whoever makes one thing
    keeps nobody waiting who asks for another."""

    def __init__(self) -> None:
        self._lock = SharedLock()
        self._by_key: WeakValueDictionary[Hashable, SharedLock] = WeakValueDictionary()

    def of(self, key: Hashable) -> SharedLock:
        with self._lock:
            lock = self._by_key.get(key)
            if lock is None:
                lock = self._by_key[key] = SharedLock()
            return lock


_making = SharedLock()
# Held while transformers builds a model: it exchanges functions of torch's meanwhile, and a second
# thread that builds one gets tensors without numbers.
building_models = SharedLock()
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
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_reopen_all)
