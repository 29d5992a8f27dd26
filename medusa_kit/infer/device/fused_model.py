"""What of a model the fused forward runs, and its weights, joined where one product reads several.

The weights of q, k and v become one tensor, as do those of gate and up. The modules' weights are
views of it, so whatever reads or writes them through the modules (saving, adapters that are merged,
training) goes on as before. A weight that is replaced is a change of the model, after which all
this is made anew.

Shapes: K inputs, N outputs, D hidden, E head dim, T nodes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_kit.base.model import BaseModel
from medusa_kit.base.model_state import watch_of
from medusa_kit.base.quantization import is_quantised
from medusa_kit.infer.model_parts import LayerParts, ModelParts, Unsupported, describe

# How captured forwards run: by torch's kernels (None), FAST or EXACT. Fused ones have not been
# measured on a device as they are here, so they are off.
FAST, EXACT = "fast", "exact"
MODE: str | None = None

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_SIZE = 256


class Matrix(NamedTuple):
    """The weights of a product."""

    weight_NK: Tensor
    bias_N: Tensor | None


@dataclass(frozen=True)
class FusedLayer:
    """A layer's joined products, and what the description says of the rest."""

    parts: LayerParts
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class FusedModel:
    """`rounds_first`: norms round to the model's dtype before they are multiplied by the weight."""

    parts: ModelParts
    layers: list[FusedLayer]
    output: Matrix
    rounds_first: bool

    @classmethod
    def of(cls, base: BaseModel) -> "FusedModel":
        """Raises Unsupported, with the reason; weights then stay as they are."""
        model = base.own_model
        kind = model.config.get_text_config().model_type
        if kind not in FAMILIES:
            raise Unsupported(f"no fused forward of {kind!r}")
        parts = describe(model, _check_weights)
        _check_sizes(parts)
        _check_biases(parts)
        # A weight that is a view of an inference tensor could not be written to or trained.
        with watch_of(model).moving(model), torch.inference_mode(False), torch.no_grad():
            layers = [_fused(layer) for layer in parts.layers]
        norm = model.get_decoder().norm.weight
        rounds_first = torch.equal(parts.final_norm, norm.float())  # those that store w - 1 do not
        return cls(parts, layers, _matrix(parts.output), rounds_first)

    @property
    def dtype(self) -> torch.dtype:
        return self.output.weight_NK.dtype

    @property
    def rotary_types(self) -> set[str | None]:
        """The names by which layers ask for their rotation; None alone where there is one."""
        if not hasattr(self.parts.rotary, "layer_types"):
            return {None}
        return {layer.rotary_type for layer in self.parts.layers}

    def rotations(self, hidden_TD: Tensor, positions_T: Tensor) -> dict[str | None, list[Tensor]]:
        """Cosines and sines [T, E], by the model's own rotary embedding."""
        found = dict[str | None, list[Tensor]]()
        for kind in self.rotary_types:
            named = [] if kind is None else [kind]
            both = self.parts.rotary(hidden_TD[None], positions_T[None], *named)
            found[kind] = [part.reshape(-1, part.shape[-1]).contiguous() for part in both]
        return found

    def rotary_type(self, layer: LayerParts) -> str | None:
        return layer.rotary_type if hasattr(self.parts.rotary, "layer_types") else None


def _check_weights(model: Any) -> None:
    """Raises Unsupported for weights that cannot be joined or read."""
    parameters = list(model.parameters())
    dtypes = {parameter.dtype for parameter in parameters}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise Unsupported(f"weights of {', '.join(sorted(map(str, dtypes)))}")
    if any(is_quantised(parameter) for parameter in parameters):
        raise Unsupported("weights are quantised")
    if len({parameter.device for parameter in parameters}) > 1:
        raise Unsupported("weights lie on several devices")
    layers = model.get_decoder().layers
    uses = Counter(id(one) for layer in layers for one in _own_parameters(layer))
    if max(uses.values()) > 1:
        raise Unsupported("layers share weights")


def _own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    return [one for _, one in layer.named_parameters(remove_duplicate=False)]


def _check_sizes(parts: ModelParts) -> None:
    if parts.head_size > MAX_HEAD_SIZE or parts.head_size % 2:
        raise Unsupported(f"heads of {parts.head_size} numbers; even and at most {MAX_HEAD_SIZE}")
    probe_TD = parts.embedding.weight[:1]
    kinds = getattr(parts.rotary, "layer_types", None)
    named = [] if kinds is None else [next(iter(kinds))]
    cosines = parts.rotary(probe_TD[None], torch.zeros_like(probe_TD[None, :, 0]).long(), *named)[0]
    if cosines.shape[-1] != parts.head_size:
        raise Unsupported("it rotates a part of each head")


def _check_biases(parts: ModelParts) -> None:
    """Before anything is moved."""
    for layer in parts.layers:
        for linears in ((layer.queries, layer.keys, layer.values), (layer.gate, layer.up)):
            if len({linear.bias is None for linear in linears}) > 1:
                raise Unsupported("some of the layers that are joined have biases")


def _fused(parts: LayerParts) -> FusedLayer:
    return FusedLayer(
        parts,
        joined([parts.queries, parts.keys, parts.values]),
        _matrix(parts.out),
        joined([parts.gate, parts.up]),
        _matrix(parts.down),
    )


def _matrix(linear: nn.Linear) -> Matrix:
    bias_N = linear.bias.detach() if linear.bias is not None else None
    return Matrix(linear.weight.detach(), bias_N)


def joined(linears: Sequence[nn.Linear]) -> Matrix:
    """The weights of several layers as one, of which theirs are views afterwards; all of them have
    biases, or none."""
    weight_NK = _joined([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Matrix(weight_NK, _joined(biases) if biases else None)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    first = parameters[0]
    sizes = [len(parameter) for parameter in parameters]
    if _lie_together(parameters):
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split(sizes), strict=True):
        parameter.data = part
    return whole


def _lie_together(parameters: Sequence[Tensor]) -> bool:
    """Whether one follows the other in one piece of memory, as they do once they were joined."""
    end = parameters[0].data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == parameters[0].untyped_storage().data_ptr()
        if not (same and parameter.is_contiguous() and parameter.data_ptr() == end):
            return False
        end += parameter.numel() * parameter.element_size()
    return True
