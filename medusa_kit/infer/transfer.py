"""Copies from the host to the device that the host does not wait for."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`values`, numbers or a tensor on the host, as a tensor on `device`.

    A copy from ordinary memory waits until the GPU has finished all earlier work. A copy from
    pinned memory does not, and torch keeps that memory until the copy is done.
    """
    here = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if (
        device.type != "cuda" or not torch.cuda.is_initialized()
    ):  # a fake device has no pinned memory
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)
