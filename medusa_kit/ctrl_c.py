"""What Ctrl-C does. The program begins with it, so it imports little.

Python raises KeyboardInterrupt wherever the program happens to be: also in code that catches
everything, in `__del__`, in what C calls back. There it is lost, and the program goes on.
`Interrupt` is noticed when it is dropped before it has reached who waits for it, and raised again.
"""

import _thread
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 128 + signal.SIGINT  # the exit code, as of shells
MOST_LOST = 20  # times that one is raised again; what swallows more never lets it through


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, on its way to who waits for it."""

    def __init__(self) -> None:
        super().__init__()
        again: Any = _thread.interrupt_main  # as if it was typed once more
        _state.way = _Way(self, again)
        _state.raised += 1


class _Way(weakref.ref[Interrupt]):
    """Calls back, with itself in the place of the signal's number, when the exception is dropped.

    That is C code alone: what Python code is interrupted in, when something is dropped, is lost.
    """

    def __index__(self) -> int:
        _state.lost += 1
        return int(signal.SIGINT)


class _State:
    pending = False  # typed, and not taken
    raised = lost = 0  # times that it was raised, and dropped on its way
    way: _Way | None = None  # of the newest; without this object nothing calls back


_state = _State()


def was_typed() -> bool:
    """Whether Ctrl-C was typed, and nobody has taken it: what has become of it does not matter."""
    return _state.pending


def taken() -> None:
    """It has reached who waited for it. The next Ctrl-C is another one."""
    _state.pending, _state.way = False, None
    _state.raised = _state.lost = 0


def _raise(number: int, frame: FrameType | None) -> None:
    """Raise it, also when it was lost. Ctrl-C typed once more ends the process at once."""
    if _state.raised > min(_state.lost, MOST_LOST):  # one is on its way still
        _end(number, frame)
    _state.pending = True
    raise Interrupt


def _end(number: int, frame: FrameType | None) -> None:
    spinner_gone = b"\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else b""
    os.write(2, spinner_gone + b"interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def is_not_lost() -> Iterator[None]:
    """Ctrl-C reaches the caller, for the whole program; after it, it ends the process at once."""
    if not is_usual():
        yield
        return
    told = sys.unraisablehook
    sys.unraisablehook = lambda found: None if found.exc_type is Interrupt else told(found)
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Ctrl-C ends the process, for imports: what is half imported may make another error of the
    exception that Python raises, or abort."""
    if not is_usual():
        yield
        return
    usual = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def is_usual() -> bool:
    """Whether Ctrl-C raises an exception here, and this thread may change that."""
    usual = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise)
    return usual and threading.current_thread() is threading.main_thread()
