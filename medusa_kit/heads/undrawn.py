"""Modules without random weights, for weights that are read right after."""

from collections.abc import Callable
from typing import Any

from torch.nn import init
from torch.overrides import TorchFunctionMode

DRAWING = (init.kaiming_uniform_, init.uniform_, init.normal_)


class Undrawn(TorchFunctionMode):
    """A context in which this thread's new modules draw no weights. torch's generator belongs to
    the whole process: a server that loads heads must not take a caller's random numbers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in DRAWING:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)
