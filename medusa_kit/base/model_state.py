"""Whether a model is what it was before, so that what was made of it still holds.

Packed weights, captured forwards, keys and values of prefixes: all of them are copies of what a
model is or has computed, and a model that somebody can reach may become another one. Weights are
written to or replaced, a hook is added, a module exchanged. So what decodes looks at the model
before each answer, and after it (infer/renewal.py).

Versions and addresses of tensors show most changes, but not writes through `.data` (peft merges so)
or numpy views. So the numbers themselves are read, of a model that was handed out: one that only
the kit has seen is not written to.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit.base.attributes import STANDS_FOR, Attributes, is_config, with_type
from medusa_kit.base.exchanged import Exchanges
from medusa_kit.base.fingerprint import contents_digest, version_of
from medusa_kit.base.hooks import EVERY_MODULE, foreign_hooks
from medusa_kit.base.own_code import PLAIN_CODE, functions_of
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.locks import lock_of

ATTRIBUTE = "medusa_kit_watch"
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
# Rotary embeddings that write to their own tables as texts grow.
CHANGING_ROTARY = ("dynamic", "longrope")
# Its modules note nothing of a forward, and which of several adapters computes is a setting.
ADAPTERS = "peft"
# What a call sets for a while, and two ways to write one thing.
CALLS_SET = ("attn_implementation", "dtype")


class ModelState:
    """Modules by identity, without keeping them alive, with their settings and functions; versions,
    places and shapes of every tensor. `contents`: their numbers too. No reference to a tensor is
    kept, not even a weak one: torch exchanges none that has one (`model.to`).

    Tables that the model itself writes to are apart (`moving`): they are compared where prefixes
    are reused, and are no change. `is_plain`: whether what the model computes follows from all
    this; a hook or an adapter may act in ways that leave no mark.
    """

    def __init__(self, model: Any, contents: bool) -> None:
        modules = list(model.modules())
        self._modules = [weakref.ref(module) for module in modules]
        noted = {module: Attributes(module) for module in modules}
        moving = [module for module in modules if _writes_to_itself(module)]
        hooks = foreign_hooks(model)
        hooked = {model.get_submodule(name) for name, _ in hooks if name != EVERY_MODULE}
        tensors, tables = _tensors_of(noted, moving, hooked), _tables(noted, moving)
        # Weights of a quantiser's own class are its library's to change, and nothing copies them.
        plain = [tensor for tensor in tensors if type(tensor) in PLAIN_TENSORS]
        configs = [config_of(model)]
        self._facts = (
            [(*_code(module), _children(module)) for module in modules],
            [_settings(module, one, moving, configs) for module, one in noted.items()],
            [(id(tensor), *_place(tensor)) for tensor in plain],
            hooks,
            functions_of({type(module) for module in modules}),
            [_without(config.to_dict()) for config in configs],
            contents_digest(_each_once(plain)) if contents else None,
        )
        self.moving = (
            [noted[module].described(configs) for module in moving],
            [(id(table), *_place(table)) for table in tables],
            contents_digest(tables),
        )
        self.is_plain = not hooks and _is_plain(model, noted, tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelState) or len(self._modules) != len(other._modules):
            return False
        pairs = zip(self._modules, other._modules, strict=True)
        same = all(one() is not None and one() is another() for one, another in pairs)
        return same and self._facts == other._facts

    __hash__ = None  # type: ignore[assignment]


class ModelWatch:
    """Counts how often one model was found to be another than at the last look. It is the model's,
    so that all who wrap that model see one count."""

    def __init__(self) -> None:
        self.number = 0
        self.is_handed_out = False  # whether code that is not the kit's may write to it
        self.state: ModelState | None = None
        self._exchanges, self._num_exchanges = Exchanges(), 0

    def look(self, model: Any) -> int:
        """The count now."""
        with lock_of(model):  # during a forward its hooks and windows are other ones
            num_exchanges = self._exchanges.number
            state = ModelState(model, self.is_handed_out)
            if self.state is not None and (
                self.state != state or self._num_exchanges != num_exchanges
            ):
                self.number += 1
                self._note_modules(model)
            self.state, self._num_exchanges = state, num_exchanges
            return self.number

    def _note_modules(self, model: Any) -> None:
        if self.is_handed_out:
            self._exchanges.watch(model.modules())

    def hand_out(self, model: Any) -> None:
        """Note its numbers before anybody can change them."""
        if self.is_handed_out:
            return
        with lock_of(model):
            self.look(model)
            self.is_handed_out = True
            self._note_modules(model)
            self.state = ModelState(model, True)

    @contextmanager
    def moving(self, model: Any) -> Iterator[None]:
        """What is inside moves weights to other memory and changes none: no change of the model."""
        with lock_of(model):
            self.look(model)
            try:
                yield
            finally:
                self.state = ModelState(model, self.is_handed_out)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the model is another model
        return ModelWatch, ()


def watch_of(model: Any) -> ModelWatch:
    watch: ModelWatch = vars(model).setdefault(ATTRIBUTE, ModelWatch())
    return watch


def _writes_to_itself(module: nn.Module) -> bool:
    kinds = vars(module).get("rope_type")
    listed = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    return any(kind in CHANGING_ROTARY for kind in listed)


def is_of_plain_code(module: nn.Module) -> bool:
    """Whether what it does follows from what is looked at here."""
    return _package(module) in PLAIN_CODE


def _package(module: nn.Module) -> str:
    return type(module).__module__.split(".")[0]


def _code(module: nn.Module) -> tuple[Any, ...]:
    """What runs when the module is called."""
    kind = getattr(type(module), STANDS_FOR, type(module))
    return kind, kind.forward, vars(module).get("forward")


def _settings(
    module: nn.Module, noted: Attributes, moving: list[nn.Module], configs: list[Any]
) -> dict[str, Any]:
    """Modules of other code may note there what a forward has set up."""
    if module in moving or not (is_of_plain_code(module) or _package(module) == ADAPTERS):
        return {}
    return noted.described(configs)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (version_of(tensor), tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape)


def _tensors_of(
    noted: dict[nn.Module, Attributes], moving: list[nn.Module], hooked: set[nn.Module]
) -> list[Tensor]:
    """Parameters, and where a module does not write to them itself its buffers and other tensors,
    module by module: several may share one."""
    tensors = list[Tensor]()
    for module, attributes in noted.items():
        tensors += _there(module._parameters)
        if module not in moving and is_of_plain_code(module):
            tensors += _there(module._buffers)
            # A hook of its own (pruning) may make the others anew for each forward.
            tensors += [] if module in hooked else attributes.tensors
    return tensors


def _children(module: nn.Module) -> list[tuple[str, int]]:
    """Which module it has under each name: several may share one."""
    return [(name, id(child)) for name, child in module._modules.items()]


def _each_once(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _tables(noted: dict[nn.Module, Attributes], moving: list[nn.Module]) -> list[Tensor]:
    return [one for m in moving for one in (*_there(m._buffers), *noted[m].tensors)]


def _there(named: dict[str, Any]) -> list[Tensor]:
    return [value for value in named.values() if isinstance(value, Tensor)]


def _is_plain(model: Any, noted: dict[nn.Module, Attributes], tensors: list[Tensor]) -> bool:
    if getattr(model, "_hf_peft_config_loaded", False):
        return False
    for module, attributes in noted.items():
        is_plain = is_of_plain_code(module) and not attributes.runs_other_code
        if "forward" in vars(module) or not is_plain:
            return False
    return all(type(tensor) in PLAIN_TENSORS and not tensor.is_inference() for tensor in tensors)


def config_of(model: nn.Module) -> Any:
    """Raises IncompatibleBaseError for a model that has none any more."""
    config = getattr(model, "config", None)
    if not is_config(config):
        raise IncompatibleBaseError(
            f"the model's config is {config!r}; expected one of transformers",
            hint="put its own config back",
        )
    return config


def _without(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model's config that say what it computes."""
    return {
        key: _without(value) if isinstance(value, dict) else with_type(value)
        for key, value in config.items()
        if not any(name in str(key) for name in CALLS_SET)
    }
