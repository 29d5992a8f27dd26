"""What CUDA refuses, and what makes the host wait: by the operation and where its tensors lie."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from support.cuda_stand_in.state import device, where
from support.cuda_stand_in.tensor import DeviceTensor

aten = torch.ops.aten
DIFFERENT = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
MASKS = (torch.bool, torch.uint8)

# The size of what they return, or the value that they return, is known to the device alone.
WAITING = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2,
    aten._unique, aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.is_nonzero,
    aten.linalg_lstsq, aten.histogram, aten.argwhere,
}  # fmt: skip
READING = {aten.index, aten._unsafe_index}
WRITING = {aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put}
# A single number on the host may take part, as in arithmetic.
TAKES_A_NUMBER = {aten.masked_fill, aten.masked_fill_, aten.fill, aten.fill_, aten.where}


def tensors_in(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def tensors_of(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Those that an operation is given."""
    return [*tensors_in(args), *tensors_in(kwargs.values())] if kwargs else tensors_in(args)


def each(work: Callable[[Tensor], Any], values: Any) -> Any:
    """`work` of each tensor in an argument or a result."""
    if isinstance(values, Tensor):
        return work(values)
    kind = type(values)
    if kind is list or kind is tuple:
        return kind([each(work, value) for value in values])
    return values


@cache
def is_mutable(func: Any) -> bool:
    """Whether it writes into an argument."""
    return bool(func._schema.is_mutable)


def check(func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> None:
    """Raises as CUDA does where devices are mixed; waits where CUDA makes the host wait.
    `tensors`: those of the arguments."""
    packet = func.overloadpacket
    if packet in READING or packet in WRITING:
        _check_index(func, args, packet in WRITING)
    else:
        _check_same_device(func, tensors)
    unknown = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if packet in WAITING or unknown:
        device().wait(func.name())


def _check_same_device(func: Any, tensors: list[Tensor]) -> None:
    here = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
    if not here or len(here) == len(tensors):
        return
    number = torch.Tag.pointwise in func.tags or func.overloadpacket in TAKES_A_NUMBER
    written = is_mutable(func) and not isinstance(tensors[0], DeviceTensor)
    if not number or written or any(tensor.dim() for tensor in here):
        raise _mixed(func.name())


def _check_index(func: Any, args: Any, writes: bool) -> None:
    there = isinstance(args[0], DeviceTensor)
    indices = [index for index in args[1] if index is not None]
    if not there and any(isinstance(index, DeviceTensor) for index in indices):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu) "
            f"({func.name()} at {where()})"
        )
    masked = any(index.dtype in MASKS for index in indices)
    if writes:
        value = args[2]
        number = value.dim() == 0 and not isinstance(value, DeviceTensor)
        if isinstance(value, DeviceTensor) != there and not (number and there):
            raise _mixed(func.name())
        if number and there and len(indices) == 1 and masked:
            masked = False  # filled under the mask, without a list of places
        elif number and there:
            _copied_from_the_host(func)
    if any(not isinstance(index, DeviceTensor) for index in indices):
        _copied_from_the_host(func)
    if masked:
        device().wait(f"{func.name()} by a mask")


def _copied_from_the_host(func: Any) -> None:
    note_unpinned()
    device().wait(f"{func.name()} copies from the host")


def note_unpinned() -> None:
    with device().counting() as active:
        for counts in active:
            counts.unpinned_copies.append(where())


def _mixed(name: str) -> RuntimeError:
    return RuntimeError(f"{DIFFERENT}and cpu! ({name} at {where()})")
