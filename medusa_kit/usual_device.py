"""Tensors that name no device lie in host memory, whatever default a caller has set.

`torch.device(...)` as a context and `torch.set_default_device` move what is made without a device:
our token ids and tables, and those of the libraries that we call.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_usual_device(function: Callable[P, R]) -> Callable[P, R]:
    """Call it with torch's own default."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return call
