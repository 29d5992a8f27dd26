"""Objects of which a test calls some methods in its own way: to fail, wait or count."""

from collections.abc import Callable
from functools import partial
from typing import Any


class Wrapped:
    """`around`: called in place of the methods of these names, with the method itself first."""

    def __init__(self, inner: Any, **around: Callable[..., Any]) -> None:
        self._inner, self._around = inner, around

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._around[name], found) if name in self._around else found


class WrappedVerifier(Wrapped):
    """Stays itself for drafters that read no layers."""

    def with_watched(self, layers: tuple[int, ...]) -> "WrappedVerifier":
        assert not layers
        return self


def raising(error: BaseException) -> Callable[..., Any]:
    """A method that fails at each call."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail
