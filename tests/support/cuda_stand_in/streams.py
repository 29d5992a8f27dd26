"""Streams and events. All work is done at once, so they only carry names and waits, and which of
another's replays a stream comes after."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.cuda_stand_in.state import DEVICE, device

_here = threading.local()


class Stream:
    """`is_default`: nothing can be captured on it. `replays`: launched on it, of which the host
    has waited for `finished`.
    """

    def __init__(self, device: Any = None, priority: int = 0, **more: Any) -> None:
        self.device, self.device_index, self.priority = DEVICE, 0, priority
        self.is_default = False
        self.replays = self.finished = 0
        self._after: dict[Stream, int] = {}

    @property
    def cuda_stream(self) -> int:
        return 0 if self.is_default else id(self)

    def wait_stream(self, other: "Stream") -> None:
        device().check()
        self._after[other] = other.replays

    def comes_after(self, other: "Stream", replays: int) -> bool:
        """Whether what is launched here now runs after so many of the other's replays."""
        return other is self or max(other.finished, self._after.get(other, 0)) >= replays

    def wait_event(self, event: "Event") -> None:
        device().check()

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        device().check()
        return True

    def is_capturing(self) -> bool:
        return device().capture() is not None

    def synchronize(self) -> None:
        device().wait("Stream.synchronize", explicit=True)


DEFAULT = Stream()
DEFAULT.is_default = True


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, **more: Any) -> None:
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        device().check()
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        device().check()

    def query(self) -> bool:
        device().check()
        return True

    def synchronize(self) -> None:
        device().wait("Event.synchronize", explicit=True)

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other._time - self._time)


def current_stream(device: Any = None) -> Stream:
    """Of this thread."""
    return getattr(_here, "stream", DEFAULT)


def default_stream(device: Any = None) -> Stream:
    return DEFAULT


def set_stream(stream: Stream) -> None:
    _here.stream = stream


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    before = current_stream()
    _here.stream = stream or before
    try:
        yield
    finally:
        _here.stream = before
