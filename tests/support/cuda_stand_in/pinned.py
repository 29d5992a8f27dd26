"""Which memory of the host counts as pinned."""

import weakref
from typing import Any

import torch
from torch import Tensor

_pinned: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def pin(tensor: Tensor) -> Tensor:
    _pinned.add(tensor.untyped_storage())
    return tensor


def is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return tensor.untyped_storage() in _pinned


def pinned_copy(tensor: Tensor, device: Any = None) -> Tensor:
    """`Tensor.pin_memory` of a tensor on the host."""
    return tensor if is_pinned(tensor) else pin(tensor.detach().clone())


def forget() -> None:
    _pinned.clear()
