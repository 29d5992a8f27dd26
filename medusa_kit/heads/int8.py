"""Heads' matrices in eight bits, as files hold them (`heads.save_dtype: int8` in a recipe).

A weight whose rows can be cut into groups of 32 numbers is stored as two tensors: NAME, in int8,
and NAME_scale, a bfloat16 for each group. A number is its integer times its group's scale.

One scale for a whole row costs acceptance: rows of `recurrent.input.weight` begin as those of an
identity, whose one large number would round all others coarsely. With groups of 32 heads that draft
in C++ lose nothing, since packing rounds the same groups again and finds the same integers.

Shapes: O outputs, I inputs, Q groups of a row, S numbers of a group.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from medusa_kit.errors import CheckpointError

GROUP = 32
LARGEST = 127
SCALE = "_scale"
HINT = "the file is damaged, or of a newer version: copy it again, or update medusa-kit"


def rounds(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of heads is stored in eight bits. Gains, norms and biases are not, nor are
    rows that groups do not fill."""
    matrix = name.endswith(".weight") and tensor.dim() == 2
    return matrix and tensor.is_floating_point() and tensor.shape[1] % GROUP == 0


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Heads' tensors as a file holds them in eight bits."""
    stored = {}
    for name, tensor in tensors.items():
        if rounds(name, tensor):
            stored[name], stored[name + SCALE] = _codes(tensor)
        else:
            stored[name] = tensor.contiguous()
    return stored


def _codes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(codes_OI, scales_OQ). Scales are cut off, not rounded, to bfloat16: so the largest number of
    each group is 127, by which packing finds the same scale again."""
    weight_OQS = weight_OI.detach().float().unflatten(1, (-1, GROUP))
    scales_OQ = weight_OQS.abs().amax(-1) / LARGEST
    scales_OQ = (scales_OQ.view(torch.int32) & ~0xFFFF).view(torch.float32)
    divisors_OQ = scales_OQ.masked_fill(scales_OQ == 0, 1.0)
    codes_OQS = (weight_OQS / divisors_OQ[..., None]).round_().clamp_(-LARGEST, LARGEST)
    return codes_OQS.to(torch.int8).view(weight_OI.shape), scales_OQ.bfloat16()


def expanded(path: Path, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, those in eight bits as float32. Raises CheckpointError for scales that
    are missing, that belong to nothing or cannot be such."""
    tensors = {}
    for name, tensor in stored.items():
        of = name.removesuffix(SCALE)
        if of != name and of in stored:
            _check_scales(path, of, stored[of], tensor)
        elif tensor.dtype == torch.int8:
            tensors[name] = _numbers(path, name, tensor, stored.get(name + SCALE))
        else:
            tensors[name] = tensor
    return tensors


def _numbers(path: Path, name: str, codes_OI: Tensor, scales_OQ: Tensor | None) -> Tensor:
    if scales_OQ is None:
        raise CheckpointError(
            f"{path}: {name} is in int8, and its scales, {name}{SCALE}, are missing", hint=HINT
        )
    _check_scales(path, name, codes_OI, scales_OQ)
    numbers_OQS = codes_OI.float().unflatten(1, (-1, GROUP)) * scales_OQ.float()[..., None]
    return numbers_OQS.view(codes_OI.shape)


def _check_scales(path: Path, name: str, codes_OI: Tensor, scales_OQ: Tensor) -> None:
    if codes_OI.dtype != torch.int8:
        raise CheckpointError(
            f"{path}: {name} has scales, and is {codes_OI.dtype}; expected torch.int8", hint=HINT
        )
    shape = tuple(codes_OI.shape)
    fits = len(shape) == 2 and shape[1] % GROUP == 0
    expected = (shape[0], shape[1] // GROUP) if fits else None
    if scales_OQ.dtype != torch.bfloat16 or tuple(scales_OQ.shape) != expected:
        raise CheckpointError(
            f"{path}: {name}{SCALE} is {scales_OQ.dtype} of shape {tuple(scales_OQ.shape)}; "
            f"expected torch.bfloat16 with one scale for {GROUP} numbers of a row of {shape}",
            hint=HINT,
        )
    if bool((scales_OQ < 0).any()):
        raise CheckpointError(f"{path}: {name}{SCALE} holds numbers below 0", hint=HINT)


def stored_bytes(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """How large a file of these tensors is, in `dtype`."""
    total = 0
    for name, tensor in tensors.items():
        size = dtype.itemsize if tensor.is_floating_point() else tensor.element_size()
        if dtype is torch.int8:
            in_8_bits = rounds(name, tensor)
            size = 1 if in_8_bits else tensor.element_size()
            total += 2 * tensor.numel() // GROUP if in_8_bits else 0
        total += size * tensor.numel()
    return total
