"""Weights that are no numbers: found, and told with the tensor that holds them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from medusa_kit.errors import CheckpointError, IncompatibleBaseError


def not_finite(tensor: Tensor) -> int:
    """How many of its numbers are NaN or infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return 0
    if tensor.itemsize == 1:  # torch computes little in 8 bits
        tensor = tensor.float()
    low, high = tensor.detach().aminmax()  # both are NaN where any number is, and no copy is made
    if bool(low.isfinite() & high.isfinite()):
        return 0
    return int(tensor.numel() - tensor.isfinite().sum())


def damage_in(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first tensor that holds any, for a message; None where there is none."""
    for name, tensor in tensors:
        if count := not_finite(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            return (
                f"{name} holds NaN or infinite numbers ({count:,} of {tensor.numel():,}, {dtype}); "
                "expected finite numbers"
            )
    return None


def overflown(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str | None:
    """The first tensor whose finite numbers are too large for `dtype`; None where there is none."""
    largest = torch.finfo(dtype).max
    for name, tensor in tensors:
        if not tensor.is_floating_point() or torch.finfo(tensor.dtype).max <= largest:
            continue
        if tensor.numel() and (size := float(tensor.abs().max())) > largest:
            short = str(dtype).removeprefix("torch.")
            return f"{name} holds numbers up to {size:.1e}, and {short} reaches {largest:.1e}"
    return None


def check_numbers(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError where a tensor of the file holds NaN or infinite numbers."""
    if (found := damage_in(tensors.items())) is not None:
        raise CheckpointError(
            f"{path}: {found}",
            hint="the file is damaged, or its training diverged: copy it again, or train anew",
        )


def check_fit(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raises IncompatibleBaseError where numbers would be infinite in `dtype`, the base's."""
    if (found := overflown(tensors.items(), dtype)) is not None:
        raise IncompatibleBaseError(
            f"{path}: {found}", hint="load the base in a wider dtype: --dtype bfloat16 or float32"
        )
