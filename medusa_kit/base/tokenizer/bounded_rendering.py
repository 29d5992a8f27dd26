"""How long a chat template may run, and how much it may write. A template comes with a model, and
what it does with a conversation of thousands of messages nobody has tried.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from medusa_kit.errors import DataError

T = TypeVar("T")
SECONDS = 5.0
MAX_WRITTEN = 1 << 24  # characters, and eight more for each piece of text
HINT = "ask with fewer or shorter messages, or use a model with another template"


_inside = threading.local()


class _TooSlow(BaseException):
    """Raised in a thread by another one. No template or library takes it for its own."""


class _TooLong(BaseException):
    pass


def bounded(template: str | dict[str, str] | None, work: Callable[[], T]) -> T:
    """`work()`, which renders `template`. Raises DataError where that takes too long, or writes too
    much. Work within such work has the outer one's limits."""
    _bound_what_is_written(template)
    if getattr(_inside, "work", False):
        return work()
    watch, _inside.work = _Watch(SECONDS), True
    try:
        try:
            return work()
        finally:
            watch.end()
            _inside.work = False
    except _TooSlow:
        reason = f"it takes more than {SECONDS:g} seconds"
    except _TooLong:
        reason = f"it writes more than {MAX_WRITTEN} characters"
    raise DataError(f"the chat template cannot render the conversation: {reason}", hint=HINT)


class _Watch:
    """Ends what its own thread does, at the next line of Python."""

    def __init__(self, seconds: float) -> None:
        self._thread, self._lock, self._over = threading.get_ident(), threading.Lock(), False
        self._timer = threading.Timer(seconds, self._raise)
        self._timer.daemon = True
        self._timer.start()

    def _raise(self) -> None:
        with self._lock:
            if not self._over:
                raised = ctypes.py_object(_TooSlow)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), raised)

    def end(self) -> None:
        with self._lock:
            self._over = True
        self._timer.cancel()


def _bound_what_is_written(template: str | dict[str, str] | None) -> None:
    """transformers keeps a compiled template, whose environment joins all that it writes."""
    from jinja2 import TemplateError
    from transformers.utils import chat_template_utils

    compiling = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compiling is not None and template:
        for one in template.values() if isinstance(template, dict) else [template]:
            with suppress(TemplateError):  # rendering it says so
                compiling(one).environment.concat = _joined


def _joined(pieces: Iterable[Any]) -> str:
    found, written = list[str](), 0
    for piece in pieces:
        written += len(piece) + 8
        if written > MAX_WRITTEN:
            raise _TooLong
        found.append(piece)
    return "".join(found)
