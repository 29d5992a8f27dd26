"""Random numbers of the device: not those of a CUDA device, only apart from the host's."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from support.cuda_stand_in.state import DEVICE, is_ours, where

HostGenerator = torch.Generator
SEEDED = torch.Tag.nondeterministic_seeded


class DeviceGenerator(HostGenerator):
    """A generator of the host that says it is the device's."""

    def __new__(cls) -> "DeviceGenerator":
        return HostGenerator.__new__(cls)

    def __init__(self) -> None:
        inner = self._cdata  # type: ignore[attr-defined]
        _known.add(inner)
        weakref.finalize(self, _known.discard, inner)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def clone_state(self) -> "DeviceGenerator":
        clone = DeviceGenerator()
        clone.set_state(self.get_state())
        return clone

    def graphsafe_set_state(self, state: torch.Generator) -> "DeviceGenerator":
        self.set_state(state.get_state())
        return self

    def manual_seed(self, seed: int) -> "DeviceGenerator":
        super().manual_seed(seed)
        return self


_known: set[int] = set()  # operations get the generator within, in another object
default = DeviceGenerator()


class _EitherKind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, HostGenerator)


class AnyGenerator(metaclass=_EitherKind):
    """`torch.Generator` while the stand-in is installed."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return DeviceGenerator() if is_ours(device) else HostGenerator(device)


@cache
def may_draw(func: Any) -> bool:
    """Whether the operation draws numbers, or takes a generator."""
    return SEEDED in func.tags or any(one.name == "generator" for one in func._schema.arguments)


def of_the_device(func: Any, kwargs: dict[str, Any]) -> Any:
    """While in here, an operation that draws does so from the device's generator."""
    given = kwargs.get("generator")
    if given is not None and given._cdata not in _known:
        raise RuntimeError(
            f"Expected a 'cuda' device type for generator but found 'cpu' ({where()})"
        )
    return _instead() if given is None and SEEDED in func.tags else nullcontext()


@contextmanager
def _instead() -> Iterator[None]:
    before = torch.random.default_generator.get_state()
    torch.random.default_generator.set_state(default.get_state())
    try:
        yield
    finally:
        default.set_state(torch.random.default_generator.get_state())
        torch.random.default_generator.set_state(before)
