"""Weights rounded to eight bits, a lossy option for decoding on a CPU.

A weight w becomes s · round(w / s), where 32 inputs of an output share s = max |w| / 127. The
linear layers of the model itself are changed, so that C++ steps, torch's forwards, the self-check
at load and heads all see one model. It is another model than the checkpoint's: answers may differ,
so reports name the weights, and none of its answers counts as identical. Everything but linear
layers keeps its numbers, and so does an input embedding that is tied to the output embedding, since
looking up a row costs nothing. The fingerprint stays the checkpoint's, whose heads fit this model.

Shapes: O outputs, I inputs, Q groups of inputs, S inputs of a group.
"""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor, nn

from medusa_kit import console
from medusa_kit.base.files import stored_quantised
from medusa_kit.base.model import INT8, BaseModel
from medusa_kit.base.placement import AUTO, pick_device
from medusa_kit.errors import ConfigError
from medusa_kit.infer.attention.step import HOLDER_ATTRIBUTE
from medusa_kit.infer.cpu.binding.kernels import Matrix, with_digits
from medusa_kit.infer.cpu.packed.packing import Blocks, PackedMatrix, pack
from medusa_kit.infer.mkl_linear import plain_linears
from medusa_kit.settings.engine import check_value

GROUP, LARGEST = 32, 127
DRAFT_DIGITS = 1  # of 8 bits, of what weights of drafts are multiplied by
LEAVE_OUT = "leave out --weights"
NAMED = 3  # unrounded layers that the note lists


def check_before_loading(
    weights: str, name: str, dtype: str, device: str, revision: str | None
) -> None:
    """Raises ConfigError where options or the model's config alone rule the weights out."""
    check_value("weights", weights)
    if weights != INT8:
        return
    _check_device(pick_device(device).type, dtype)
    if method := stored_quantised(name, revision):
        raise _quantised(name, f" ({method})")


def with_weights(base: BaseModel, weights: str) -> BaseModel:
    """`base` with such weights, rounded in place. The base must not be in use by an engine yet.

    Raises ConfigError where that is impossible, and where the base already has other weights.
    """
    check_value("weights", weights)
    if weights == base.info.weights:
        return base
    if weights != INT8:
        raise ConfigError(
            f"weights {weights!r} were asked for, but those of this base are rounded to "
            f"{base.info.weights}",
            hint=f"load the base again, or ask for weights={base.info.weights!r}",
        )
    _check_device(base.device.type, base.info.dtype)
    if base.info.quantized:
        raise _quantised(base.info.name)
    if base.is_light:
        raise ConfigError(
            "the weights of a light base are packed as they were asked for when it was loaded",
            hint=f"load the base again, with weights={weights!r}",
        )
    if hasattr(base.own_model, HOLDER_ATTRIBUTE):
        raise ConfigError(
            "weights cannot be rounded while an engine decodes with them",
            hint="load the base again",
        )
    base.changes()
    _round_linears(base)
    base.adopt()
    return base


def refuse_int8_weights(base: BaseModel, requirement: str) -> None:
    """Raises ConfigError for a lossy base: `requirement` must come from the checkpoint's model."""
    if base.info.lossy:
        raise ConfigError(
            f"the base's weights are rounded to {base.info.weights}, which is lossy; {requirement}",
            hint="load the base again, with the checkpoint's weights",
        )


def int8_blocks(weight_OI: Tensor) -> Blocks:
    """The weights as codes and scales, which `expand` to the rounded weights. 32 must divide I."""
    weight_OQS = weight_OI.unflatten(1, (-1, GROUP))
    scales_OQ = weight_OQS.abs().amax(-1) / LARGEST
    divisors_OQ = scales_OQ.masked_fill(scales_OQ == 0, 1.0)
    codes_OQS = (weight_OQS / divisors_OQ[..., None]).round_().clamp_(-LARGEST, LARGEST)
    return Blocks(codes_OQS.to(torch.int8).view(weight_OI.shape), scales_OQ, None)


def packed_rounded(weight_OI: Tensor, bias_O: Tensor | None = None) -> PackedMatrix:
    """Weights that need not be exact, as those of drafts: rounded where the inputs can be cut into
    groups."""
    weight_OI = weight_OI.detach().float()
    fits = weight_OI.shape[1] % GROUP == 0
    return pack(weight_OI, bias_O, int8_blocks(weight_OI) if fits else None)


def rounding(matrix: PackedMatrix) -> Matrix:
    """A weight of drafts, whose factors are rounded to eight bits where it is in integers."""
    return with_digits(matrix.struct, DRAFT_DIGITS)


def rounded(layer: nn.Linear, weight_OI: Tensor) -> Tensor:
    """Weights of a layer as `with_weights` leaves them."""
    if layer.in_features % GROUP:
        return weight_OI
    return int8_blocks(weight_OI).expand()


def _check_device(device: str, dtype: str) -> None:
    if device != "cpu":
        raise ConfigError(
            f"weights int8 are for a CPU; the device is {device}",
            hint=f"{LEAVE_OUT} and load a model that transformers quantises, or use --device cpu",
        )
    if dtype not in ("float32", AUTO):  # auto on a CPU is float32
        raise ConfigError(
            f"weights int8 need dtype float32, in which a CPU multiplies; it is {dtype}",
            hint=f"use --dtype float32 (weights are still stored in eight bits), or {LEAVE_OUT}",
        )


def _quantised(name: str, how: str = "") -> ConfigError:
    return ConfigError(
        f"weights int8 are for a model in full precision; {name!r} is quantised already{how}",
        hint=f"{LEAVE_OUT}: the model decodes exactly with its own blocks",
    )


@torch.no_grad()
def _round_linears(base: BaseModel) -> None:
    layers = plain_linears(base.own_model)
    fitting = [layer for layer in layers if layer.in_features % GROUP == 0]
    if not fitting:
        raise none_fits(base.info.name)
    sharing: dict[int, list[nn.Linear]] = defaultdict(list)
    for layer in fitting:
        sharing[id(layer.weight)].append(layer)
    for same in sharing.values():
        blocks = int8_blocks(same[0].weight.detach())
        weight = nn.Parameter(blocks.expand(), requires_grad=False)
        for layer in same:
            layer.weight = weight
            base.scales[layer] = blocks.scales_OQ
    base.info = replace(base.info, weights=INT8)
    _untie(base)
    _report(base, layers)


def _untie(base: BaseModel) -> None:
    """Keep transformers from tying the rounded output embedding to the input embedding again."""
    if base.own_output in base.scales:
        base.own_model.config.tie_word_embeddings = False
        base.config.tie_word_embeddings = False


def none_fits(name: str) -> ConfigError:
    return ConfigError(
        f"no weights of {name!r} can be rounded to int8: no linear layer has a multiple of {GROUP} "
        "inputs",
        hint=LEAVE_OUT,
    )


def _report(base: BaseModel, layers: list[nn.Linear]) -> None:
    names = {module: name for name, module in base.own_model.named_modules()}
    unrounded = [names[layer] for layer in layers if layer not in base.scales]
    rounded = sum(layer.weight.numel() for layer in base.scales)
    report_rounded(len(base.scales), rounded / base.info.num_parameters, unrounded)


def report_rounded(layers: int, share: float, unrounded: list[str]) -> None:
    """Print what was rounded. `share`: of the parameters; `unrounded`: names of layers."""
    note = (
        f"weights rounded to int8, which is LOSSY: {layers} linear layers, "
        f"{min(share, 1.0):.0%} of the parameters"
    )
    if unrounded:
        listed = ", ".join(unrounded[:NAMED]) + (", …" if len(unrounded) > NAMED else "")
        note += f"; {len(unrounded)} are not rounded: inputs are no multiple of {GROUP} ({listed})"
    console.note(note)
