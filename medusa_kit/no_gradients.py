"""torch's inference mode for functions that others call within it, at each step.

Entering it takes some microseconds, several times that behind a step in C++, whose weights have
taken the caches.

What a signal raises (Ctrl-C) may come at any line of Python, so `torch.inference_mode()`, whose
`__enter__` and `__exit__` are Python, can be cut off halfway. The mode is then left when the
traceback is freed, to what it was on entering. Within another one that is on again, for good. So
the mode is entered once, in C++, where no signal comes between.
"""

import inspect
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def no_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.inference_mode()` as a decorator, entered only where it is not on already.

    A generator is in it while it computes, not while its caller has the item."""
    if inspect.isgeneratorfunction(function):
        return cast(Callable[P, R], _in_steps(function))

    @wraps(function)
    def without(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch._C._InferenceMode(True):
            return function(*args, **kwargs)

    return without


def _in_steps(function: Callable[..., Iterator[R]]) -> Callable[..., Iterator[R]]:
    end = object()

    @wraps(function)
    def without(*args: Any, **kwargs: Any) -> Iterator[R]:
        generator = cast(Generator[R, None, None], function(*args, **kwargs))
        following, close = no_gradients(next), no_gradients(generator.close)
        try:
            while (item := following(generator, end)) is not end:
                yield cast(R, item)
        finally:
            close()

    return without
