"""The interface of a tree attention backend, and the cases it may support."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """What a layer asks for. Trees, lengths and windows are not in it: every backend does all.

    `hides`: whether some node may not see some slot in sight, so that stock kernels need a mask.
    `index`: which device of its kind; None is the current one.
    """

    device: str  # cpu | cuda | ...
    dtype: torch.dtype
    head_size: int
    value_size: int
    softcap: bool = False
    sinks: bool = False
    hides: bool = True
    index: int | None = None

    @classmethod
    def of(
        cls,
        query_BHNE: Tensor,
        value_BGLE: Tensor,
        softcap: float | None,
        sinks_H: Tensor | None,
        hides: bool = True,
    ) -> "Case":
        return cls(
            query_BHNE.device.type,
            query_BHNE.dtype,
            query_BHNE.shape[-1],
            value_BGLE.shape[-1],
            softcap is not None,
            sinks_H is not None,
            hides,
            query_BHNE.device.index,
        )


@dataclass(frozen=True)
class Backend:
    """`attend` has the signature of `tree_sdpa`: [B, H, N, E] queries in, [B, N, H, E] out.

    `unsupported` says why a case cannot be done, or None; `missing` the same of this installation,
    with the extra that would bring what is missing. `reads_lengths`: whether it reads the rows'
    lengths on the host, so that a step of fixed shapes cannot use it.
    """

    attend: Callable[..., Tensor]
    unsupported: Callable[[Case], str | None]
    missing: Callable[[], tuple[str, str] | None] = lambda: None
    reads_lengths: bool = False


class BackendFailure(RuntimeError):
    """A backend that could have done a case cannot run on this machine; `str` says why."""


def compute_capability(index: int | None = None) -> tuple[int, int]:
    """Of the CUDA device with that index, or of the current one."""
    return torch.cuda.get_device_capability(index)
