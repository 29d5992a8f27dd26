"""Weights that are used as they lie in a file are mapped from it.

A person who copies another checkpoint over that file would exchange them under the model, or end
the process. Nobody writes to the Hub's cache or to ours.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from medusa_kit.base.model_state import PLAIN_TENSORS


def copy_mapped(model: Any) -> None:
    """Give what is mapped memory of its own, once where weights are tied."""
    copy_tensors([*model.parameters(), *model.buffers()])


def copy_tensors(tensors: Iterable[Tensor]) -> None:
    copies = dict[Any, Tensor]()
    for tensor in tensors:
        if type(tensor) not in PLAIN_TENSORS or tensor.device.type != "cpu":
            continue
        if not tensor.untyped_storage().resizable():
            place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            tensor.data = copies.setdefault(place, tensor.data.clone())
