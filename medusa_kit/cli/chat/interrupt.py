"""Ctrl-C between two steps of an answer. In the midst of one it would leave the batch in a state
that nobody knows, and the next turn would read the whole conversation again."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from medusa_kit.ctrl_c import is_usual


@contextmanager
def between_steps(has_begun: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """Gives a function to call between steps, which raises KeyboardInterrupt if Ctrl-C was typed.

    Until the answer has begun, and when typed once more, Ctrl-C interrupts at once.
    """
    typed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal typed
        if typed or not has_begun():
            usual(number, frame)
        typed = True

    def check() -> None:
        if typed:
            raise KeyboardInterrupt

    if not is_usual():
        yield check
        return
    usual: Any = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, usual)
