"""CUDA graphs as tapes: the operations of a capture, run again on the same memory."""

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from support.cuda_stand_in import pinned
from support.cuda_stand_in.rules import each, tensors_in, tensors_of
from support.cuda_stand_in.state import device, poison
from support.cuda_stand_in.streams import Stream, current_stream

FAILED = "CUDA error: operation failed due to a previous error during capture"
GIVEN_UP = "it->second->use_count > 0 INTERNAL ASSERT FAILED"
NOT_RECORDED = "Called CUDAGraph::replay without a preceding successful capture."
BLANK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
Pool = tuple[int, int]
UNORDERED = "this stream does not wait for another's replay of a graph that shares the memory"
_last_replay: "dict[Pool, tuple[Stream, int]]" = {}
_numbers = itertools.count(1)
_sharing: "dict[Pool, weakref.WeakSet[CUDAGraph]]" = {}


def graph_pool_handle() -> Pool:
    return 0, next(_numbers)


class Launch(NamedTuple):
    """One operation of a tape. `made`: what it allocated, to be written again at each replay."""

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    made: list[Tensor]


class Capture:
    """The operations of a capture. A device runs none of them yet. The stand-in does, for their
    shapes, and takes back what they wrote."""

    def __init__(self, mode: str) -> None:
        self.mode, self.reason = mode, ""
        self.tape: list[Launch] = []
        self.memory: dict[int, Tensor] = {}  # what was allocated within, by storage
        self._read: dict[int, list[Tensor]] = {}  # pinned memory of the host, by storage
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def invalidate(self, reason: str) -> None:
        self.reason = self.reason or reason

    def before(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            given = {one.name: value for one, value in zip(arguments, args, strict=False)} | kwargs
            for one in arguments:
                if one.alias_info is not None and one.alias_info.is_write:
                    for tensor in tensors_in([given.get(one.name)]):
                        self.before_writing(tensor)

    def before_writing(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self.memory and key not in self._before:
            whole = _whole(tensor)
            self._before[key] = whole, whole.clone()

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor]) -> None:
        self.tape.append(Launch(func, each(self._held, args), kwargs, made))
        for tensor in made:
            self.memory.setdefault(tensor.untyped_storage()._cdata, _whole(tensor))

    def _held(self, tensor: Tensor) -> Tensor:
        """Of pinned memory a graph knows the address, and holds nothing."""
        if not pinned.is_pinned(tensor):
            return tensor
        tensor = tensor.detach()
        self._read.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        return tensor

    def poison_what_was_given_up(self) -> None:
        for tensors in self._read.values():
            if pinned.given_up(tensors):
                poison(_whole(tensors[0]))

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)
        for memory in self.memory.values():
            poison(memory)


def _whole(tensor: Tensor) -> Tensor:
    """All memory that a tensor lies in."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (size,), (1,))


class CUDAGraph:
    """What torch.cuda.CUDAGraph is, as far as it is used here."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._pool: Pool | None = None
        self._clean = True  # its memory is poisoned

    def capture_begin(
        self, pool: Pool | None = None, capture_error_mode: str = "global", **more: Any
    ) -> None:
        device().check()
        if current_stream().is_default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        thread = threading.get_ident()
        if thread in device().captures:
            raise torch.AcceleratorError("CUDA error: the stream is being captured already")
        self._pool = pool or graph_pool_handle()
        if not _sharing.get(self._pool, True):  # graphs were in it, and none is left
            raise RuntimeError(f"{GIVEN_UP}, please report a bug to PyTorch.")
        device().captures[thread] = Capture(capture_error_mode)

    def capture_end(self) -> None:
        capture = device().captures.pop(threading.get_ident(), None)
        if capture is None:
            raise torch.AcceleratorError("CUDA error: no capture is under way")
        with _disable_current_modes(), torch.inference_mode():
            capture.undo()
        with device().counting() as active:
            for counts in active:
                counts.captures += not capture.reason
                counts.failed_captures += bool(capture.reason)
        device().check()
        if capture.reason:
            raise torch.AcceleratorError(f"{FAILED} ({capture.reason})")
        self._capture = capture
        weakref.finalize(self, _destroyed).atexit = False
        assert self._pool is not None
        _sharing.setdefault(self._pool, weakref.WeakSet()).add(self)

    def replay(self) -> None:
        device().check()
        if self._capture is None:
            raise RuntimeError(NOT_RECORDED)
        assert self._pool is not None
        self._take_turn(self._pool)
        with _disable_current_modes(), torch.inference_mode():
            for other in list(_sharing[self._pool]):
                other.overwrite()
            self._clean = False
            self._capture.poison_what_was_given_up()
            for launch in self._capture.tape:
                _again(launch)
        with device().counting() as active:
            for counts in active:
                counts.operations_per_replay.append(len(self._capture.tape))

    def _take_turn(self, pool: Pool) -> None:
        """Graphs of one pool must not run at the same time."""
        here, last = current_stream(), _last_replay.get(pool)
        if last is not None and not here.comes_after(*last):
            raise RuntimeError(UNORDERED)
        here.replays += 1
        _last_replay[pool] = here, here.replays

    def overwrite(self) -> None:
        """Its memory is others' too: what a replay left there is gone with the next one."""
        if not self._clean and self._capture is not None:
            for memory in self._capture.memory.values():
                poison(memory)
            self._clean = True

    def pool(self) -> Pool | None:
        return self._pool

    def reset(self) -> None:
        if self._capture is not None:
            self._capture = None
            _destroyed()


def _destroyed() -> None:
    """A graph must not be destroyed in a capture."""
    capture = device().capture()
    if capture is not None:
        capture.invalidate("another graph was destroyed")


def _again(launch: Launch) -> None:
    name = getattr(getattr(launch.func, "overloadpacket", None), "__name__", "")
    if name in BLANK:
        return  # whatever lies there
    found = launch.func(*launch.args, **launch.kwargs)
    if launch.made:
        known = {one.untyped_storage()._cdata for one in tensors_of(launch.args, launch.kwargs)}
        made = [one for one in tensors_in([found]) if one.untyped_storage()._cdata not in known]
        for target, value in zip(launch.made, made, strict=True):
            target.copy_(value)
