"""Whether a model is what it was at an earlier request, so that its keys and values still hold.

C++ steps read weights packed at load. A model that torch runs may have become another one: weights
written to or replaced, a hook, an adapter, another `forward`. What can be compared is compared;
where something is in use that leaves no mark, nothing can be said.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit.base.fingerprint import sampled_digest
from medusa_kit.base.hooks import foreign_hooks
from medusa_kit.infer.verifier import Verifier

PLAIN_CODE = ("torch", "transformers", "medusa_kit")  # what these modules do follows from the below
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
SETTING = (int, float, str, type(None))


class ModelState:
    """Modules and tensors by identity, without keeping them alive; settings of every module;
    versions, places and a sample of the numbers of every tensor."""

    def __init__(self, model: Any) -> None:
        modules = list(model.modules())
        tensors = _tensors_of(modules)
        self._parts: list[weakref.ref[Any]] = [weakref.ref(part) for part in (*modules, *tensors)]
        self._facts = (
            [(type(module), type(module).forward, _settings(module)) for module in modules],
            [(one._version, one.data_ptr(), one.dtype, one.device) for one in tensors],
            _settings(model.config),
            torch.is_autocast_enabled(model.device.type),
            sampled_digest(tensors),  # writes through `.data` change no version
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelState) or len(self._parts) != len(other._parts):
            return False
        pairs = zip(self._parts, other._parts, strict=True)
        same = all(ours() is not None and ours() is theirs() for ours, theirs in pairs)
        return same and self._facts == other._facts

    __hash__ = None  # type: ignore[assignment]


State = ModelState | int | None  # of a model; None: nothing can be said


def state_of(verifier: Verifier) -> State:
    """What is equal as long as keys and values hold that a verifier has computed; None: nothing
    can be said."""
    if verifier.reads_packed_weights:
        return verifier.base.weights_version()
    model = verifier.base.model
    return ModelState(model) if _is_plain(model) else None


def _is_plain(model: Any) -> bool:
    """Whether what the model computes follows from what `ModelState` compares."""
    modules = list(model.modules())
    if foreign_hooks(model) or getattr(model, "_hf_peft_config_loaded", False):
        return False
    for module in modules:
        if "forward" in vars(module) or type(module).__module__.split(".")[0] not in PLAIN_CODE:
            return False
    return all(
        type(one) in PLAIN_TENSORS and not one.is_inference() for one in _tensors_of(modules)
    )


def _tensors_of(modules: list[nn.Module]) -> list[Tensor]:
    """Parameters and buffers, each once."""
    found = [
        tensor
        for module in modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    return list({id(tensor): tensor for tensor in found}.values())


def _settings(owner: Any) -> dict[str, Any]:
    """Plain values among its attributes, such as `training` or an epsilon."""
    return {name: value for name, value in vars(owner).items() if isinstance(value, SETTING)}
