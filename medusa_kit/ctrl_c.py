"""What Ctrl-C does while modules are imported. The program begins with it, so it imports little."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Ctrl-C ends the process, for imports: what is half imported may lose the exception that
    Python raises, make another error of it, or abort."""

    def end(number: int, frame: FrameType | None) -> None:
        spinner_gone = b"\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else b""
        os.write(2, spinner_gone + b"interrupted\n")
        os._exit(128 + number)

    if not is_usual():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_usual() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt here, and this thread may change that."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return usual and threading.current_thread() is threading.main_thread()
