"""Waiting for what a server does in its own time."""

import threading
from collections.abc import Callable
from typing import Any


def until(happened: Callable[[], Any], seconds: float = 60.0) -> None:
    """Raises AssertionError where it does not happen in about so many seconds."""
    waiting = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if happened():
            return
        waiting.wait(0.02)
    raise AssertionError("it did not happen")
