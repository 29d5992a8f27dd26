"""Attributes of a module that can change what it computes: plain values, functions, and containers
and dataclasses of these.

transformers writes to none of them in a forward, but for tensors and for names that begin with `_`,
which do not count.
An object of another kind counts as the one that it is, whatever is in it.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from medusa_kit.base.own_code import is_own

SETTING = (int, float, str, type(None))
LISTS = (list, tuple)
STANDS_FOR = "stands_for"  # of a class of ours: the class whose place its modules have taken
OURS = "medusa_"  # the kit's package, and what it notes on modules of others
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}  # parameters, hooks and such
# What a model has for generate, for the trainer and for saving.
NOT_COMPUTED = ("generation_config", "generate", "prepare_inputs_for_generation", "loss_function",
                "warnings_issued", "all_tied_weights_keys", "save_pretrained")  # fmt: skip
# Of the modules of peft: which adapter computes, and whether any does.
SWITCHES = ("_active_adapter", "_disable_adapters", "_adapters_enabled")


class The:
    """This very object. It stays alive as long as somebody compares it, so that no other one takes
    its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, The) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class Attributes:
    """Those of one module, as they are now. `settings`: plain values by name. `others`: containers,
    functions and objects. `tensors`: alone or in containers, besides parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.settings, self.others = dict[str, Any](), dict[str, Any]()
        is_ours = _is_ours(type(module))
        self.tensors = list[Tensor]()
        for name, value in vars(module).items():
            if name in OF_EVERY_MODULE:
                continue
            counts = name[0] != "_" or name in SWITCHES
            if isinstance(value, SETTING):
                if counts:
                    self.settings[name] = with_type(value)
            elif isinstance(value, Tensor):
                self.tensors.append(value)
            elif counts and not (is_ours or name.startswith(OURS) or name in NOT_COMPUTED):
                self.others[name] = value
        self._within = [one for value in self.others.values() for one in _within(value)]
        self.tensors += [one for one in self._within if isinstance(one, Tensor)]

    def described(self, configs: list[Any]) -> dict[str, Any]:
        """What compares equal as long as they are the same. `configs`: takes each config of
        transformers that is found, once; a setting says which it is."""
        if not self.others:
            return self.settings
        others = {name: described(value, configs) for name, value in self.others.items()}
        return {**self.settings, **others}

    @property
    def runs_other_code(self) -> bool:
        """Whether a function among them is neither torch's nor transformers'."""
        return not all(is_own(one) for one in self._within if _is_function(one))


def with_type(value: Any) -> tuple[type, Any]:
    """8, 8.0 and True compare equal, and torch takes one of them where it refuses another."""
    return type(value), value


def described(value: Any, configs: list[Any], around: tuple[Any, ...] = ()) -> Any:
    """What compares equal as long as the value computes the same. Tensors are compared apart.
    `around`: the containers that it is in, of which it may be one."""
    if isinstance(value, SETTING):
        return with_type(value)
    if isinstance(value, Tensor):
        return Tensor
    if is_config(value):
        return "config", _place_in(configs, value)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if _is_among(around, value):
        return "around", [one is value for one in around]
    if (parts := _parts(value)) is not None:
        return type(value), [described(part, configs, (*around, value)) for part in parts]
    return id(value) if isinstance(value, nn.Module) else _kept(value)


def _is_ours(kind: type) -> bool:
    """Also where torch derives a class from it, for a parametrization."""
    return kind.__module__.startswith(OURS) or hasattr(kind, STANDS_FOR)


def _kept(value: Any) -> Any:
    """A method of an object is made anew each time that it is asked for."""
    is_method = hasattr(value, "__self__") and hasattr(value, "__func__")
    return (The(value.__self__), The(value.__func__)) if is_method else The(value)


def _parts(value: Any) -> list[Any] | None:
    """What a container consists of; None for what is none."""
    if isinstance(value, LISTS):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return None


def _within(value: Any, around: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The value itself, or what a container holds."""
    parts = None if isinstance(value, partial) or is_config(value) else _parts(value)
    if parts is None:
        yield value
    elif not _is_among(around, value):
        for part in parts:
            yield from _within(part, (*around, value))


def _is_among(around: tuple[Any, ...], value: Any) -> bool:
    return any(one is value for one in around)


def is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, type, Tensor))


def _place_in(configs: list[Any], config: Any) -> int:
    for place, one in enumerate(configs):
        if one is config:
            return place
    configs.append(config)
    return len(configs) - 1
