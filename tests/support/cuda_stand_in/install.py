"""Puts the stand-in in place of torch's CUDA, and takes all of it out again."""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from medusa_kit.base import model_state
from support.cuda_stand_in import graph, operations, pinned, random_numbers, runtime
from support.cuda_stand_in.state import DEVICE, Device, is_ours, set_device
from support.cuda_stand_in.tensor import DeviceTensor, DispatchMode, moved

BOOTSTRAP = "_bootstrap_inner"  # what a new thread runs first
SDPA = torch.ops.aten.scaled_dot_product_attention.default


@contextmanager
def installed() -> Iterator[Device]:
    """A CUDA device for this thread and for those that are started within."""
    stand_in = Device()
    set_device(stand_in)
    with ExitStack() as stack:
        for place, names in _replaced():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(place, name, value, create=True))
        stack.callback(
            torch.__future__.set_swap_module_params_on_conversion,
            torch.__future__.get_swap_module_params_on_conversion(),
        )
        torch.__future__.set_swap_module_params_on_conversion(True)  # a module keeps its parameters
        _forget()
        stack.callback(_forget)
        stack.enter_context(DispatchMode())
        yield stand_in


def _replaced() -> list[tuple[Any, dict[str, Any]]]:
    return [
        (torch.cuda, runtime.CUDA),
        (torch.cuda.graphs, {"CUDAGraph": graph.CUDAGraph}),
        (torch.cuda.graph, {"default_capture_stream": None}),
        (torch.accelerator, runtime.ACCELERATOR),
        (torch._C, runtime.HIDDEN),
        (torch, {
            "Generator": random_numbers.AnyGenerator,
            "tensor": _made_there(torch.tensor),
            "as_tensor": _made_there(torch.as_tensor),
            "asarray": _made_there(torch.asarray),
        }),
        (torch.Tensor, {
            "to": _to(torch.Tensor.to),
            "cuda": _cuda,
            "pin_memory": pinned.pinned_copy,
            "is_pinned": pinned.is_pinned,
        }),
        (functional, {"scaled_dot_product_attention":
                      _attention(functional.scaled_dot_product_attention)}),
        (model_state, {"PLAIN_TENSORS": (*model_state.PLAIN_TENSORS, DeviceTensor)}),
        (threading.Thread, {BOOTSTRAP: _with_mode(getattr(threading.Thread, BOOTSTRAP))}),
    ]  # fmt: skip


def _made_there(make: Any) -> Any:
    """`torch.tensor` and the like: values on the host, then copied."""

    @wraps(make)
    def made(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **more: Any):  # type: ignore[no-untyped-def]
        if isinstance(data, DeviceTensor) and make is not torch.tensor:
            return moved(data, device, more.get("dtype"))
        device = torch.get_default_device() if device is None else device
        if not is_ours(device):
            out = make(data, *args, **more, device=device)
            return pinned.pin(out) if pin_memory else out
        wanted = more.pop("requires_grad", False)
        here = make(data, *args, **more, device="cpu")
        return moved(here, device, None).requires_grad_(wanted)

    return made


def _to(original: Any) -> Any:
    @wraps(original)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = [*args, *kwargs.values()]
        if not isinstance(self, DeviceTensor) and not any(_names_us(one) for one in named):
            return original(self, *args, **kwargs)
        how = {name: kwargs.pop(name) for name in ("copy", "memory_format") if name in kwargs}
        other = args[0] if args else kwargs.pop("other", None)
        if isinstance(other, Tensor):
            place, dtype, rest = other.device, other.dtype, args[1:]
            return moved(self, place, dtype, non_blocking=bool(rest and rest[0]), **how)
        place, dtype, later, _ = torch._C._nn._parse_to(*args, **kwargs)
        return moved(self, place, dtype, non_blocking=later, **how)

    return to


def _names_us(value: Any) -> bool:
    if isinstance(value, DeviceTensor):
        return True
    return isinstance(value, str | torch.device) and is_ours(value)


def _cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **more: Any) -> Tensor:
    return moved(self, DEVICE if device is None else device, None, non_blocking=non_blocking)


def _attention(original: Any) -> Any:
    """One kernel, but where gradients are asked for."""

    @wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [one for one in [*args, *kwargs.values()] if isinstance(one, Tensor)]
        ours = any(isinstance(one, DeviceTensor) for one in tensors)
        if not ours or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors)):
            return original(*args, **kwargs)
        with DispatchMode() as mode:
            return operations.run(mode, SDPA, args, kwargs)

    return attention


def _with_mode(bootstrap: Any) -> Any:
    def start(thread: threading.Thread) -> None:
        with DispatchMode():
            bootstrap(thread)

    return start


def _forget() -> None:
    """Nothing that was remembered of the other world, no tensor and no answer, stays."""
    pinned.forget()
    for name, module in list(sys.modules.items()):
        of_ours = name.startswith("medusa_kit.") and not name.startswith("medusa_kit.infer.cpu")
        if of_ours or name in ("transformers.utils.import_utils", "torch.utils._triton"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
                    value.cache_clear()
