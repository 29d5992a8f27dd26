"""A verifier made fast for its machine, and self-checked: what every command decodes through.

On CUDA steps of fixed shapes are replayed as graphs where that applies (`cuda_graph/`).
On a CPU whole steps run in C++ where the family is known to it, else linear layers do, else torch's
own MKL packs them. Whatever is chosen must pass the same self-check as the model alone.
"""

import os
from dataclasses import dataclass

import torch

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.describe import Unsupported
from medusa_kit.infer.cpu.fused_norm import install_fused_norms
from medusa_kit.infer.cpu.kernels import OFF_SWITCH
from medusa_kit.infer.cpu.linear import install_native_linears
from medusa_kit.infer.cpu.mkl_linear import fits_in_memory, install_packed_linears
from medusa_kit.infer.cuda_graph.runner import GraphRunner
from medusa_kit.infer.cuda_graph.shapes import use_fixed_shapes
from medusa_kit.infer.self_check import TreeCheck, check_trees, checked_verifier
from medusa_kit.infer.verifier import Verifier


@dataclass(frozen=True)
class Backends:
    """What decodes: the verifier, the self-check that it passed, and what runs whole steps on the
    device where that applies."""

    verifier: Verifier
    check: TreeCheck
    graphs: GraphRunner | None = None


def prepare_backends(
    base: BaseModel,
    attention: str = "auto",
    fixed_shapes: str = "auto",
    compiled: bool = False,
    keep_layers: bool = False,
) -> Backends:
    """Raises ConfigError, IncompatibleBaseError. A backend of tree attention asked for by name is a
    wish to see it run, so C++ does not take whole steps then. `keep_layers`: the model is in other
    use too, so its own layers stay as they are.
    """
    if not keep_layers:
        install_fused_norms(base.model)
    verifier, check = checked_verifier(base, attention)
    graphs, check = use_fixed_shapes(verifier, check, fixed_shapes, compiled)
    if graphs is not None or base.device.type != "cpu":
        return Backends(verifier, check, graphs)
    try:
        if attention != "auto":
            raise Unsupported(f"attention {attention} was asked for")
        verifier.native = native_decoder(base)
        own = check_trees(verifier)
        verifier.steps_run_by = f"C++ ({verifier.native.summary})"
    except Unsupported as reason:
        verifier.steps_run_by = f"torch ({reason})"
        if keep_layers:
            return Backends(verifier, check)
        return Backends(verifier, _with_fast_linears(verifier, check, str(reason)))
    except IncompatibleBaseError as error:
        verifier.native = None
        verifier.steps_run_by = "torch (the C++ steps were refused)"
        console.warn(f"steps run through torch, since the C++ ones were refused: {error.message}")
        return Backends(verifier, check)
    return Backends(verifier, max(own, check, key=lambda measured: measured.rounding_tolerance))


def _with_fast_linears(verifier: Verifier, check: TreeCheck, reason: str) -> TreeCheck:
    """Torch runs the steps; its linear layers may still be exchanged."""
    model, scales = verifier.base.model, verifier.base.scales
    if verifier.base.dtype != torch.float32 or not fits_in_memory(model):
        return check
    if os.environ.get(OFF_SWITCH) != "0" and install_native_linears(model, scales):
        verifier.steps_run_by = f"torch, linear layers by C++ ({reason})"
    elif install_packed_linears(model):
        verifier.steps_run_by = f"torch, linear layers packed by MKL ({reason})"
    own = check_trees(verifier)
    return max(own, check, key=lambda measured: measured.rounding_tolerance)
