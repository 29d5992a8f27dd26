"""Timing by CUDA events on a device, by the processor's clock in a dry run."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

WARM_UPS = 3
SYNC_WARNING = "synchronizing CUDA operation"  # torch's warning at each wait, in debug mode "warn"


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the minimum of several."""

    median: float
    least: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        return cls(statistics.median(seconds), min(seconds))


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"

    def each(self, call: Callable[[], Any], repeats: int, warm_ups: int = WARM_UPS) -> Timing:
        """Times each call by itself, between two events.

        Work of the host in between counts where the call waits for the device, as a step does that
        reads its result.
        """
        for _ in range(warm_ups):
            call()
        self.wait()
        return Timing.of([measured() for measured in [self.around(call) for _ in range(repeats)]])

    def around(self, call: Callable[[], Any]) -> Callable[[], float]:
        """Run the call now; the function returned gives its seconds later, after all timing."""
        if not self.on_cuda:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            return lambda: seconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()

        def seconds_between() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

        return seconds_between

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def syncs(self, call: Callable[[], Any], repeats: int) -> float | None:
        """How often the host waits for the device in a call, by torch's warnings."""
        if not self.on_cuda:
            for _ in range(repeats):
                call()
            return None
        with warnings.catch_warnings(record=True) as caught, _warnings_of_syncs():
            warnings.simplefilter("always")
            for _ in range(repeats):
                call()
        return sum(SYNC_WARNING in str(warning.message) for warning in caught) / repeats


@contextmanager
def _warnings_of_syncs() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_mode("warn")
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: int | str) -> None:
    """Set torch's debug mode without its warning, at the first call in a process, that the setting
    is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
