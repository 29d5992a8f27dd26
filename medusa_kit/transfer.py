"""Copies between host and device: to the device without a wait, back with one for all of them."""

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


def together_on_host(*parts: Tensor) -> list[Tensor]:
    """These tensors on the host, in one transfer. Whole numbers up to 2^53 stay as they are."""
    if all(part.device.type == "cpu" for part in parts):
        return list(parts)
    whole = torch.cat([part.double().flatten() for part in parts]).cpu()
    sizes = [part.numel() for part in parts]
    return [
        piece.to(part.dtype).view(part.shape)
        for piece, part in zip(whole.split(sizes), parts, strict=True)
    ]
