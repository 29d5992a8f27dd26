"""Numbers on their way from the host to the device, without the host waiting."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `values`, numbers or a tensor on the host, on `device`.

    A copy from ordinary memory waits until the GPU has done all that it was given before; one from
    pinned memory does not, and torch keeps that memory until the copy is over.
    """
    here = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type != "cuda" or not torch.cuda.is_initialized():  # not a real one
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)
