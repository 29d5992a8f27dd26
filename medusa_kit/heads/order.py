"""The highest logits in one order everywhere: by logit descending, then column ascending.

Shapes: R columns, C of them, X any leading shape.
"""

import torch
from torch import Tensor


def best_columns(logits_XR: Tensor, count: int) -> Tensor:
    """columns_XC of the `count` highest logits. The host does not wait for a device."""
    if not may_look(logits_XR):
        return columns_by_key(logits_XR, count)
    top = torch.topk(logits_XR, count, dim=-1)
    # topk leaves the order of equal logits open; they are rare, so sort only where they occur.
    equal_inside = (top.values[..., 1:] == top.values[..., :-1]).any()
    equal_outside = (logits_XR >= top.values[..., -1:]).sum(-1).max() > count
    if equal_inside or equal_outside:
        return logits_XR.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return top.indices


def may_look(values: Tensor) -> bool:
    """Whether Python can read a value without waiting for a device."""
    return values.device.type == "cpu"


def columns_by_key(logits_XR: Tensor, count: int) -> Tensor:
    """`best_columns` without a branch.

    Logit and column are packed into one integer, so that no two are equal.
    """
    if logits_XR.dtype == torch.float64:
        return logits_XR.argsort(dim=-1, descending=True, stable=True)[..., :count]
    R = logits_XR.shape[-1]
    bits_XR = (logits_XR.float() + 0.0).view(torch.int32)  # -0.0 equals 0.0
    rising_XR = bits_XR ^ ((bits_XR >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    last_first_R = torch.arange(R - 1, -1, -1, device=logits_XR.device)
    return torch.topk(rising_XR.long() * R + last_first_R, count, dim=-1).indices
