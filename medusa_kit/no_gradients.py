"""torch's inference mode for functions that others call within it, at each step.

Entering it takes some microseconds, several times that behind a step in C++, whose weights have
taken the caches.

What a signal raises (Ctrl-C) may come at any line of Python, so `torch.inference_mode()`, whose
`__enter__` and `__exit__` are Python, can be cut off halfway. The mode is then left when the
traceback is freed, to what it was on entering. Within another one that is on again, for good. So
the mode is entered once, in C++, where no signal comes between.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def no_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.inference_mode()` as a decorator, entered only where it is not on already."""

    @wraps(function)
    def without(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch._C._InferenceMode(True):
            return function(*args, **kwargs)

    return without
