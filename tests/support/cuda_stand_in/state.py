"""What the device knows of itself: what it counts, its memory, its captures."""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)
# What torch's C++ takes our tensors for: a device without kernels, whose gradients are computed
# in the thread that asks for them. Tensors that C++ makes "on the same device" name it too.
INSIDE = torch.device("lazy")
OWN = "/support/cuda_stand_in/"
LOST = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call."
)
CAPTURING = "CUDA error: operation not permitted when stream is capturing"


class Wait(NamedTuple):
    """`what` the host waited for, and `where`: the nearest line of medusa_kit or transformers."""

    what: str
    where: str


@dataclass
class Counts:
    """What happened on the device.

    `waits`: every wait of the host, also one that was refused. `sent`: where it copied to the
    device. `unpinned_copies`: where it copied from ordinary memory. `launches`: operations that
    ran, by name, outside of replays and captures; views are none. `operations_per_replay`: how
    many each replay ran.
    """

    waits: list[Wait] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    unpinned_copies: list[str] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    captures: int = 0
    failed_captures: int = 0
    operations_per_replay: list[int] = field(default_factory=list)

    @property
    def replays(self) -> int:
        return len(self.operations_per_replay)

    def waits_by_place(self) -> Counter[Wait]:
        return Counter(self.waits)


@dataclass
class Memory:
    """What torch.cuda says of the device's memory. Nothing is added up: an allocation fails that is
    above `largest`, in bytes."""

    free: int = 12 << 30
    total: int = 16 << 30
    allocated: int = 0
    largest: int | None = None


class Device:
    """The state of one stand-in. `captures`: the one that each thread records, by thread.

    `capability` is one for which neither Triton nor flash kernels are made, since only torch's own
    operations can be shown.
    """

    name = "CUDA stand-in"
    capability = (7, 5)
    cores = 40

    def __init__(self) -> None:
        self.counts = Counts()
        self.memory = Memory()
        self.debug_mode = 0
        self.captures: dict[int, Any] = {}
        self._active = [self.counts]
        self._lock = threading.RLock()
        self._unread: list[tuple[Tensor, Tensor]] = []
        self._lost = False

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """What happens within, in all threads."""
        counts = Counts()
        self._active.append(counts)
        try:
            yield counts
        finally:
            self._active = [one for one in self._active if one is not counts]

    @contextmanager
    def counting(self) -> Iterator[list[Counts]]:
        """All counts that are under way, for the thread that adds to them."""
        with self._lock:
            yield self._active

    def count_launch(self, name: str) -> None:
        with self._lock:
            for counts in self._active:
                counts.launches[name] += 1

    def fail_for_good(self) -> None:
        """From now on every operation fails, as after a bad address in a kernel."""
        self._lost = True

    def check(self) -> None:
        """Raises where the device is lost."""
        if self._lost:
            raise torch.AcceleratorError(LOST)

    def capture(self) -> Any:
        """What this thread records, or None."""
        return self.captures.get(threading.get_ident())

    def wait(self, what: str, explicit: bool = False) -> None:
        """The host waits. `explicit`: it was asked to, which torch's debug mode says nothing about.

        Raises where a capture or the debug mode forbids it.
        """
        from support.cuda_stand_in.streams import current_stream

        self.check()
        place = where()
        with self.counting() as active:
            for counts in active:
                counts.waits.append(Wait(what, place))
        self._refuse_in_a_capture(what, place)
        if self.debug_mode and not explicit:
            said = f"called a synchronizing CUDA operation ({what} at {place})"
            if self.debug_mode == 2:
                raise RuntimeError(said)
            warnings.warn(said, stacklevel=2)
        self.finish_copies()
        current_stream().finished = current_stream().replays

    def _refuse_in_a_capture(self, what: str, place: str) -> None:
        own = self.capture()
        for capture in list(self.captures.values()):
            if capture is own or capture.mode == "global":
                capture.invalidate(f"{what} at {place}")
                raise torch.AcceleratorError(f"{CAPTURING} ({what} at {place})")

    def copy_later(self, target: Tensor, value: Tensor) -> None:
        """A copy to the host that nobody waits for: it is there after the next wait."""
        with self._lock:
            self._unread.append((target, value))
        poison(target)

    def finish_copies(self) -> None:
        with self._lock:
            copies, self._unread = self._unread, []
        for target, value in copies:
            target.copy_(value)


def poison(tensor: Tensor) -> None:
    """Fill memory with what no step computes."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max - 41)


def where() -> str:
    """The nearest line of medusa_kit or transformers that led here, else of a test."""
    frame, test = sys._getframe(1), "?"
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        for package in ("/medusa_kit/", "/transformers/"):
            if package in name:
                return f"{(package + name.rsplit(package, 1)[1])[1:]}:{frame.f_lineno}"
        if test == "?" and "/tests/" in name and OWN not in name:
            test = f"tests/{name.rsplit('/tests/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return test


_device = Device()


def device() -> Device:
    """The one that is installed, or the last one."""
    return _device


def set_device(new: Device) -> None:
    global _device
    _device = new


def is_ours(place: Any) -> bool:
    """Whether `place`, as a caller names a device, is the one that is stood in for."""
    if place is None:
        return False
    if isinstance(place, int):
        place = torch.device("cuda", place)
    place = torch.device(place)
    if place.type == "cuda" and place.index not in (None, 0):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return place.type in ("cuda", INSIDE.type)
