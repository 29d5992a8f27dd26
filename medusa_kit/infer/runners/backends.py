"""The fastest verifier for a model on its machine, self-checked: every command decodes through it.

On CUDA, forwards are captured and replayed as graphs where they can be (`infer/device/`).
On a CPU, whole steps run in C++ for the families that it knows. Else linear layers run in C++, or
torch's MKL packs them. Whatever is chosen must pass the same self-check as the model alone.
"""

import os
from dataclasses import dataclass, replace

import torch

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.chains.choice import checked_verifier, self_check, verifier_for
from medusa_kit.infer.cpu.activations import with_activations
from medusa_kit.infer.cpu.binding.kernels import OFF_SWITCH
from medusa_kit.infer.cpu.cache_dtype import store_cache_as
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.linear import install_native_linears
from medusa_kit.infer.cpu.packed_base import PackedBase
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.device.shapes import use_fixed_shapes
from medusa_kit.infer.mkl_linear import (
    SHARE_OF_KERNELS,
    fits_in_memory,
    install_packed_linears,
)
from medusa_kit.infer.model_parts import Unsupported
from medusa_kit.infer.self_check import TreeCheck, changed_since, check_trees, coarsest
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.engine import FLOAT32


@dataclass(frozen=True)
class Backends:
    """The verifier, and the self-check that it passed."""

    verifier: Verifier
    check: TreeCheck


def prepare_backends(
    base: BaseModel,
    attention: str = "auto",
    fixed_shapes: str = "auto",
    compiled: bool = False,
    keep_layers: bool = False,
    cache: str = FLOAT32,
    activations: str = FLOAT32,
) -> Backends:
    """The fastest verifier that passes the self-check. A backend of tree attention that is
    requested by name is meant to run, so C++ then takes no whole steps. `keep_layers`: the model is
    used elsewhere too, so none of its layers is replaced. `cache`: how keys and values are stored.
    `activations`: the precision of what quantised weights are multiplied by.
    Raises ConfigError, IncompatibleBaseError.
    """
    backends = _prepare(base, attention, fixed_shapes, compiled, keep_layers)
    verifier, check = with_activations(backends.verifier, backends.check, activations)
    store_cache_as(cache, verifier)
    return replace(backends, verifier=verifier, check=check)


def _prepare(
    base: BaseModel, attention: str, fixed_shapes: str, compiled: bool, keep_layers: bool
) -> Backends:
    if isinstance(base, PackedBase):
        if attention == "auto" and fixed_shapes != "always":
            return _light_backends(base)
        base.reference.stop()  # the whole model is its own
    plain, check = checked_verifier(base, attention)
    captured, check, obstacle = use_fixed_shapes(plain, check, fixed_shapes, compiled)
    if captured is not None:
        return Backends(captured, check)
    if base.device.type != "cpu":
        by = "torch" if obstacle is None else f"torch (not captured: {obstacle})"
        return Backends(verifier_for(base, plain.attention, by), check)
    try:
        if attention != "auto":
            raise Unsupported(f"attention {attention} was asked for")
        native = NativeVerifier(base, native_decoder(base), plain.attention)
        return Backends(native, coarsest([check, check_trees(native)]))
    except Unsupported as reason:
        by = f"torch ({reason})"
        if not keep_layers and (linears := _fast_linears(base, str(reason))) is not None:
            by, plain = linears, verifier_for(base, plain.attention, linears)
            check = coarsest([check, check_trees(plain)])
    except IncompatibleBaseError as error:
        if changed_since(base):
            raise
        by = "torch (the C++ steps were refused)"
        console.warn(f"steps run through torch, since the C++ ones were refused: {error.message}")
    return Backends(verifier_for(base, plain.attention, by), check)


def check_base(base: BaseModel) -> TreeCheck:
    """`self_check`, of a light base by its C++ steps in the precision of its hidden states."""
    if not isinstance(base, PackedBase):
        return self_check(base)
    backends = _light_backends(base)
    return with_activations(backends.verifier, backends.check, base.text_activations)[1]


def _light_backends(base: PackedBase) -> Backends:
    native = NativeVerifier(base, base.decoder)
    native.attention.expected = "C++"
    try:
        return Backends(native, check_trees(native, base.reference))
    except IncompatibleBaseError as error:
        console.warn(f"steps run through torch, since the C++ ones were refused: {error.message}")
    finally:
        base.reference.stop()  # where a check is remembered
    plain, check = checked_verifier(base)
    by = "torch (the C++ steps were refused)"
    return Backends(verifier_for(base, plain.attention, by), check)


def _fast_linears(base: BaseModel, reason: str) -> str | None:
    """Replace the model's linear layers by faster ones; returns what then runs steps, or None."""
    if base.dtype != torch.float32 or not fits_in_memory(base.own_model, SHARE_OF_KERNELS):
        return None
    if os.environ.get(OFF_SWITCH) != "0" and install_native_linears(base.own_model, base.scales):
        return f"torch, linear layers by C++ ({reason})"
    if fits_in_memory(base.own_model) and install_packed_linears(base.own_model):
        return f"torch, linear layers packed by MKL ({reason})"
    return None
