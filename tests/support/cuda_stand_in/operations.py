"""One operation of torch: on the host as ever, on the device by its rules, counted, captured."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from support.cuda_stand_in import pinned, random_numbers, rules
from support.cuda_stand_in.state import DEVICE, device, is_ours, where
from support.cuda_stand_in.tensor import DeviceTensor, DispatchMode

aten = torch.ops.aten
HOST = torch.device("cpu")
# Made of others, but nothing in them waits; attention is one kernel of the device.
WHOLE = {aten.scaled_dot_product_attention, aten.linear, aten.matmul, aten.reshape}


def _histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return aten.histc(values.double(), *args, **kwargs).to(values.dtype)


# What the host has for other dtypes only.
ON_THE_HOST: dict[Any, Any] = {aten.histc.default: _histc}


def run(mode: DispatchMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is torch.ops.prim.device.default:
        return DEVICE
    tensors = rules.tensors_of(args, kwargs)
    there = any(isinstance(one, DeviceTensor) for one in tensors)
    if not there and not is_ours(kwargs.get("device")):
        return _on_the_host(func, args, kwargs)
    if _made_of_others(func):
        with mode:
            return func.decompose(*args, **kwargs)
    device().check()
    if func.overloadpacket is aten._to_copy:
        return _to_copy(func, args, kwargs)
    if func.overloadpacket is aten.copy_:
        return _copy(func, *args, **kwargs)
    rules.check(func, tensors, args, kwargs)
    return on_device(func, args, kwargs)


@cache
def _made_of_others(func: Any) -> bool:
    """Whether it is no kernel of its own, as without inference mode C++ sees to."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return composite and func.overloadpacket not in WHOLE


def _on_the_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("pin_memory"):
        return pinned.pin(func(*args, **{**kwargs, "pin_memory": False}))
    return func(*args, **kwargs)


def on_device(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on what the tensors hold; its results are on the device."""
    if kwargs:
        kwargs = _for_the_host(kwargs)
    held = {name: rules.each(_held, value) for name, value in kwargs.items()}
    out = launch(func, rules.each(_held, args), held)
    if not rules.is_mutable(func):
        return rules.each(DeviceTensor, out)
    ours = [one for one in rules.tensors_of(args, kwargs) if isinstance(one, DeviceTensor)]
    written = {id(tensor.held): _still(tensor, func) for tensor in ours}
    return rules.each(
        lambda one: written[id(one)] if id(one) in written else DeviceTensor(one), out
    )


def _still(tensor: DeviceTensor, func: Any) -> DeviceTensor:
    if tensor.shape != tensor.held.shape:
        raise NotImplementedError(f"the stand-in cannot show {func.name()}, which changes a shape")
    return tensor


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, DeviceTensor) else tensor


def _for_the_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    return kwargs if kwargs.get("device") is None else {**kwargs, "device": HOST}


def launch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on plain tensors, and record it where this thread captures."""
    capture = device().capture()
    if capture is not None:
        capture.before(func, args, kwargs)
    work = ON_THE_HOST.get(func, func)
    if random_numbers.may_draw(func):
        with random_numbers.of_the_device(func, kwargs):
            out = work(*args, **kwargs)
    else:
        out = work(*args, **kwargs)
    made = _made(func, args, kwargs, out)
    if made is not None:
        _allocated(made)
        if capture is not None:
            capture.record(work, args, kwargs, made)
        else:
            device().count_launch(func.name())
    return out


def _made(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> list[Tensor] | None:
    """What the operation allocated; None where it only looked at its arguments in another way."""
    if rules.is_mutable(func):
        return []
    known = {one.untyped_storage()._cdata for one in rules.tensors_of(args, kwargs)}
    made = rules.tensors_in([out])
    new = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
    return new if new or not made else None


def _allocated(made: list[Tensor]) -> None:
    memory = device().memory
    if memory.largest is None:
        return
    for tensor in made:
        if (size := tensor.untyped_storage().nbytes()) > memory.largest:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. GPU 0 has a total capacity "
                f"of {memory.total} bytes of which {memory.free} bytes is free."
            )


# Copies between host and device.


def _to_copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    source, place = args[0], kwargs.get("device")
    there = isinstance(source, DeviceTensor) if place is None else is_ours(place)
    if not isinstance(source, DeviceTensor):
        _sent(source, bool(kwargs.get("non_blocking")))
    elif not there:
        return _fetched(func, source, kwargs)
    return on_device(func, args, {**kwargs, "non_blocking": False})


def _fetched(func: Any, source: DeviceTensor, kwargs: dict[str, Any]) -> Tensor:
    later = bool(kwargs.get("non_blocking"))
    if not later:
        device().wait("a copy to the host")
    value = func(source.held, **{**kwargs, "device": HOST, "non_blocking": False})
    if not later:
        device().count_launch("copy to the host")
        return value
    target = pinned.pin(torch.empty_like(value))
    _later(target, value)
    return target


def _copy(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, DeviceTensor):
        if not isinstance(source, DeviceTensor):
            _sent(source, non_blocking)
        return on_device(func, (target, source), {})
    assert isinstance(source, DeviceTensor)
    if non_blocking and pinned.is_pinned(target):
        _later(target, source.held)
    else:
        device().wait("a copy to the host")
        target.copy_(source.held)
        device().count_launch("copy to the host")
    return target


def _sent(source: Tensor, non_blocking: bool) -> None:
    with device().counting() as active:
        for counts in active:
            counts.sent.append(where())
    if source.numel() and not (non_blocking and pinned.is_pinned(source)):
        if not pinned.is_pinned(source):
            rules.note_unpinned()
        device().wait("a copy to the device")


def _later(target: Tensor, value: Tensor) -> None:
    """A copy to pinned memory, in a capture one more step of the tape."""
    capture = device().capture()
    if capture is None:
        device().count_launch("copy to the host")
        device().copy_later(target, value.clone())
    else:
        capture.before_writing(target)
        capture.record(lambda a, b: device().copy_later(a, b.clone()), (target, value), {}, [])
