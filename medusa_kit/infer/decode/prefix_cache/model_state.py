"""Whether a model is what it was before, so that what was made of it still holds.

C++ steps read weights packed at load. A model that torch runs may have become another one: weights
written to or replaced, a hook, an adapter, another `forward`. What can be compared is compared;
where something is in use that leaves no mark, nothing can be said of keys and values.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit.base.fingerprint import sampled_digest, version_of
from medusa_kit.base.hooks import foreign_hooks
from medusa_kit.infer.verifier import Verifier

PLAIN_CODE = ("torch", "transformers", "medusa_kit")  # what these modules do follows from the below
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
SETTING = (int, float, str, type(None))


class ModelState:
    """Modules and tensors by identity, without keeping them alive; settings and functions of every
    module; versions and places of every tensor. `besides`: what else is compared. `private`:
    whether settings named `_…` are, in which transformers also notes what calls have set up."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Sequence[Tensor],
        besides: Any,
        private: bool = True,
    ) -> None:
        self._parts: list[weakref.ref[Any]] = [weakref.ref(part) for part in (*modules, *tensors)]
        self._facts = (
            [
                (type(m), type(m).forward, vars(m).get("forward"), _settings(m, private))
                for m in modules
            ],
            [(version_of(part), part.data_ptr(), part.dtype, part.device) for part in tensors],
            besides,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelState) or len(self._parts) != len(other._parts):
            return False
        pairs = zip(self._parts, other._parts, strict=True)
        same = all(part() is not None and part() is other_part() for part, other_part in pairs)
        return same and self._facts == other._facts

    __hash__ = None  # type: ignore[assignment]


State = ModelState | int | None  # of a model; None: nothing can be said


def state_of(verifier: Verifier) -> State:
    """What is equal as long as keys and values hold that a verifier has computed; None: nothing
    can be said."""
    if verifier.reads_packed_weights:
        return verifier.base.weights_version()
    model = verifier.base.model
    modules = list(model.modules())
    tensors = _tensors_of(modules)
    if not _is_plain(model, modules, tensors):
        return None
    autocast = torch.is_autocast_enabled(model.device.type)
    # Writes through `.data` change no version.
    besides = _settings(model.config), autocast, sampled_digest(tensors)
    return ModelState(modules, tensors, besides)


def _is_plain(model: Any, modules: list[nn.Module], tensors: list[Tensor]) -> bool:
    """Whether what the model computes follows from what is compared."""
    if foreign_hooks(model) or getattr(model, "_hf_peft_config_loaded", False):
        return False
    for module in modules:
        if "forward" in vars(module) or type(module).__module__.split(".")[0] not in PLAIN_CODE:
            return False
    return all(type(tensor) in PLAIN_TENSORS and not tensor.is_inference() for tensor in tensors)


def _tensors_of(modules: list[nn.Module]) -> list[Tensor]:
    """Parameters and buffers, each once."""
    tensors = [
        tensor
        for module in modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _settings(owner: Any, private: bool = True) -> dict[str, Any]:
    """Plain values among its attributes, such as `training` or an epsilon."""
    return {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, SETTING) and (private or not name.startswith("_"))
    }
