"""A LoRA adapter beside a model that is also used without it: added by hooks during a forward.

Nothing of the model is replaced or merged, so that it computes as before in between. The adapter is
one that Medusa-2 trained (adapters.py).

Shapes: X any leading shape, I in, O out, R rank.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from medusa_kit.base.adapters import CONFIG_NAME, WEIGHTS_NAME
from medusa_kit.base.faults.finite import check_numbers
from medusa_kit.base.mapped import copy_tensors
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import CheckpointError, IncompatibleBaseError
from medusa_kit.files import parse_json

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class AdapterLayer:
    """What is added to the output of one of the model's linear layers."""

    name: str
    module: Any
    down_RI: Tensor
    up_OR: Tensor  # scaled

    def __call__(self, module: Any, inputs: tuple[Tensor, ...], out_XO: Tensor) -> Tensor:
        """A forward hook, which is there during a forward alone."""
        x_XI = inputs[0].to(self.down_RI.dtype)
        return out_XO + F.linear(F.linear(x_XI, self.down_RI), self.up_OR).to(out_XO.dtype)


class AdapterLayers:
    """The layers of the adapter in `folder`. Raises CheckpointError, IncompatibleBaseError."""

    def __init__(self, folder: Path, base: BaseModel) -> None:
        scale = _scale(folder / CONFIG_NAME)
        tensors = _tensors(folder / WEIGHTS_NAME)
        self._base, self._number = base, base.number
        self.layers = [
            _layer(base, name, pair, scale, folder / WEIGHTS_NAME)
            for name, pair in sorted(tensors.items())
        ]
        parts = [part for one in self.layers for part in (one.down_RI, one.up_OR)]
        self.num_bytes = sum(part.numel() * part.element_size() for part in parts)

    @contextlib.contextmanager
    def added(self) -> Iterator[None]:
        """Within this context the model computes with the adapter. The caller holds its lock."""
        if self._number != self._base.number:  # modules may have been replaced
            model, self._number = self._base.own_model, self._base.number
            self.layers = [
                replace(one, module=model.get_submodule(one.name)) for one in self.layers
            ]
        handles: list[Any] = []
        try:
            for layer in self.layers:
                handles.append(layer.module.register_forward_hook(layer))
            yield
        finally:
            for handle in handles:
                handle.remove()


def _scale(path: Path) -> tuple[float, bool]:
    """(alpha, whether it is divided by the rank's square root). Raises CheckpointError."""
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
        kind, alpha, by_root = config["peft_type"], config["lora_alpha"], config.get("use_rslora")
        changed = [key for key in ("alpha_pattern", "use_dora", "layer_replication")
                   if config.get(key)]  # fmt: skip
        if not math.isfinite(alpha := float(alpha)):
            raise ValueError(f"lora_alpha {alpha}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} does not describe an adapter: {error!r}") from error
    if kind != "LORA" or changed:
        raise CheckpointError(
            f"{path} describes an adapter of kind {kind!r} {', '.join(changed)}".rstrip()
            + "; expected a plain LORA",
            hint="merge it into its base, and serve that",
        )
    return alpha, bool(by_root)


def _tensors(path: Path) -> dict[str, dict[str, Tensor]]:
    """By module: lora_A as "A", lora_B as "B". Raises CheckpointError."""
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", hint="the file is cut off or damaged: copy it again"
        ) from error
    check_numbers(path, found)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{path}: {name} is unexpected; expected lora_A and lora_B")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    return pairs


def _layer(
    base: BaseModel, name: str, pair: dict[str, Tensor], scale: tuple[float, bool], path: Path
) -> AdapterLayer:
    if len(pair) != 2 or any(one.dim() != 2 for one in pair.values()):
        raise CheckpointError(f"{path}: {name} has no pair of matrices lora_A and lora_B")
    try:
        module = base.own_model.get_submodule(name)
    except AttributeError:
        raise IncompatibleBaseError(
            f"{path}: the base has no layer {name}", hint="load the base it was trained on"
        ) from None
    down_RI, up_OR = (pair[part].to(base.device, base.dtype) for part in "AB")
    copy_tensors([down_RI, up_OR])
    rank, sizes = down_RI.shape[0], {up_OR.shape[0], down_RI.shape[1]}
    if up_OR.shape[1] != rank or sizes != set(module.weight.shape):
        raise IncompatibleBaseError(
            f"{path}: {name} has matrices of shapes {tuple(down_RI.shape)} and "
            f"{tuple(up_OR.shape)}, which do not fit a layer of {tuple(module.weight.shape)}",
            hint="load the base it was trained on",
        )
    alpha, by_root = scale
    return AdapterLayer(name, module, down_RI, up_OR * (alpha / (rank**0.5 if by_root else rank)))
