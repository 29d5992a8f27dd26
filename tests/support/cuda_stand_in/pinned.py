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


def given_up(tensors: list[Tensor]) -> bool:
    """Whether nobody holds the pinned memory of these tensors but they themselves."""
    return _holders(tensors[0]) <= _OF_NONE + len(tensors)


def _holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_OF_NONE = _holders(pin(torch.ones(1))) - 1  # how torch counts depends on its version


def forget() -> None:
    _pinned.clear()
