"""What a captured step must not do: let the host read a value, or mix host and device.

A CUDA graph replays kernels only. What Python derived from a value while it was recorded, such as a
branch or a size, stays the same in every replay. The guard finds such places on any device, even on
a CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten
# The host has to read a value to know what these return, or its size.
READS = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.nonzero_numpy,
    aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class HostRead(RuntimeError):
    """An operation that a captured step must not contain; `str` says which."""


class NoHostReads(TorchDispatchMode):
    """Raises HostRead at the first operation that the host would have to wait for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operations arrive here undecomposed
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func.overloadpacket in READS or _indexes_by_truth(func, args) or _counts(func, kwargs):
            raise HostRead(f"{func} waits for a value on the host")
        result = func(*args, **kwargs)
        # A number becomes a tensor without dimensions on the host, which a kernel takes as it is.
        involved = [t for t in tree_iter((args, kwargs, result)) if isinstance(t, Tensor)]
        if len({t.device.type for t in involved if t.dim() > 0}) > 1:
            raise HostRead(f"{func} moves values between host and device")
        return result


def _indexes_by_truth(func: Any, args: Any) -> bool:
    if func.overloadpacket not in INDEXING:
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def _counts(func: Any, kwargs: dict[str, Any]) -> bool:
    """repeat_interleave by a tensor, unless the size of its output is given."""
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
