"""Cross-entropy directly from hidden states, by a maintained library where the device has one.

`liger` (Liger Kernel, arXiv 2410.10989) works by chunks like our own code, in Triton.
`cut_cross_entropy` (arXiv 2411.09009) never writes a logit to memory. Both support only targets of
one token, so soft targets, the other losses and everything else that a library cannot do are left
to chunked.py. The result is summed over positions: the caller divides by the update's counts.

Shapes: P positions, D hidden, R columns of the projection.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from medusa_kit import console
from medusa_kit.base.logit_scale import LogitScale
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import ConfigError
from medusa_kit.heads.blocks import linear_of
from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.settings.recipe import TrainRecipe

NO_TARGET = -100


class Columns(NamedTuple):
    """A plain linear projection: logits_PR = scale(z_PD @ weight_RD.T + bias_R)."""

    weight_RD: Tensor
    bias_R: Tensor | None
    scale: LogitScale


class Library(NamedTuple):
    module: str
    function: str
    dtypes: tuple[torch.dtype, ...]
    knows_bias: bool
    needs_target: bool  # whether at least one position must have a target
    accumulators: tuple[str, ...]  # its options for summing gradients in float32
    compute: Callable[[Tensor, Tensor, Tensor | None, Tensor, float | None], Tensor]
    hint: str


def _liger(
    z_PD: Tensor, weight_RD: Tensor, bias_R: Tensor | None, targets_P: Tensor, cap: float | None
) -> Tensor:
    graded = torch.is_grad_enabled()
    return cast(Tensor, _LigerLoss.apply(z_PD, weight_RD, bias_R, targets_P, cap, graded))


class _LigerLoss(torch.autograd.Function):
    """Liger's function that computes loss and gradients at once, without a wait for the device.

    Its function for models also waits for the device in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z_PD: Tensor,
        weight_RD: Tensor,
        bias_R: Tensor | None,
        targets_P: Tensor,
        cap: float | None,
        graded: bool,
    ) -> Tensor:
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(graded and wanted)
            for tensor, wanted in zip((z_PD, weight_RD, bias_R), ctx.needs_input_grad, strict=False)
        ]
        with _CountsTargets(len(targets_P)):
            loss, *_, of_z, of_weight, of_bias = _function("liger")(
                inputs[0], inputs[1], targets_P, bias=inputs[2], ignore_index=NO_TARGET,
                reduction="sum", softcap=cap, accum_dtype=torch.float32,
            )  # fmt: skip
        ctx.wanted = ctx.needs_input_grad[:3]
        ctx.save_for_backward(of_z, of_weight, of_bias)
        return cast(Tensor, loss)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            outer[0].to(gradient.dtype) * gradient if wanted and gradient is not None else None
            for gradient, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        )
        return (*scaled, None, None, None)


class _CountsTargets(TorchFunctionMode):
    """Answers Liger's count of positions with a target without a wait for the device.

    Only a mean needs the count; for a sum any positive number will do.
    """

    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self._num_positions = num_positions

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.item and args[0].dtype == torch.int64:
            return self._num_positions
        return func(*args, **(kwargs or {}))


def _cut_cross_entropy(
    z_PD: Tensor, weight_RD: Tensor, bias_R: Tensor | None, targets_P: Tensor, cap: float | None
) -> Tensor:
    """Without the library's filter, which drops small gradients, and with gradients summed in
    float32, not in the 16 bits of their tensors."""
    assert bias_R is None
    library = LIBRARIES["cut_cross_entropy"]
    return cast(
        Tensor,
        _function("cut_cross_entropy")(
            z_PD, weight_RD, targets_P, ignore_index=NO_TARGET, softcap=cap, reduction="sum",
            filter_eps=None, **dict.fromkeys(library.accumulators, True),
        ),
    )  # fmt: skip


def _function(library: str) -> Any:
    return getattr(importlib.import_module(LIBRARIES[library].module), LIBRARIES[library].function)


HALVES = (torch.bfloat16, torch.float16)
LIBRARIES = {  # in the order in which `auto` tries them
    "liger": Library(
        "liger_kernel.ops.fused_linear_cross_entropy", "fused_linear_cross_entropy_forward",
        (torch.float32, *HALVES), True, False, ("accum_dtype",), _liger,
        "pip install 'medusa-kit[fused]' where there is CUDA, or train.fused_loss=auto",
    ),
    "cut_cross_entropy": Library(
        "cut_cross_entropy", "linear_cross_entropy", HALVES, False, True,
        ("accum_e_fp32", "accum_c_fp32"), _cut_cross_entropy,
        "install it from source (github.com/apple/ml-cross-entropy; the package index has an older "
        "one) where there is CUDA, or train.fused_loss=auto",
    ),
}  # fmt: skip


def summed(library: str, z_PD: Tensor, targets_P: Tensor, columns: Columns) -> Tensor:
    """Cross-entropy summed over positions, with gradient. targets_P: columns, below 0 for none.

    If the library `needs_target`, at least one position must have one.
    """
    weight_RD, bias_R, scale = columns
    targets_P = targets_P.masked_fill(targets_P < 0, NO_TARGET)
    z_PD = scale.before_cap(z_PD.to(weight_RD.dtype)).contiguous()
    bias_R = None if bias_R is None else scale.before_cap(bias_R)
    with torch.cuda.device_of(z_PD):  # Triton launches kernels on the current device
        return LIBRARIES[library].compute(z_PD, weight_RD, bias_R, targets_P, scale.cap)


def head_columns(heads: MedusaHeads, k: int) -> Columns | None:
    """Head k's projection, where it is plain."""
    weights = heads.linear(k)
    return None if weights is None else Columns(*weights, heads.base.scale_logits)


def base_columns(base: BaseModel) -> Columns | None:
    """The base's output embedding, where it is plain."""
    weights = linear_of(base.output_embedding)
    return None if weights is None else Columns(*weights, base.scale_logits)


def check_named(recipe: TrainRecipe, device: torch.device) -> None:
    """Raises ConfigError where the recipe names a library that is not needed or cannot run."""
    named = recipe.train.fused_loss
    if named not in LIBRARIES:
        return
    if not (_heads_learn_tokens(recipe) or _base_learns_tokens(recipe)):
        raise ConfigError(
            f"train.fused_loss {named!r} with train.loss {recipe.train.loss!r}: it computes "
            "cross-entropy against tokens only",
            hint="train.loss=cross_entropy, joint.distill_share=0, or train.fused_loss=auto",
        )
    if (why := _absent(named, device) or _sharded(recipe)) is not None:
        raise ConfigError(f"train.fused_loss {named!r}: {why}", hint=LIBRARIES[named].hint)


def choose(recipe: TrainRecipe, heads: MedusaHeads) -> str | None:
    """The library that computes this run's losses against tokens; None for the chunked code.

    Raises ConfigError where the recipe names one that cannot.
    """
    named, device = recipe.train.fused_loss, heads.base.device
    check_named(recipe, device)
    terms = [head_columns(heads, 0)] if _heads_learn_tokens(recipe) else []
    terms += [base_columns(heads.base)] if _base_learns_tokens(recipe) else []
    possible: list[str] = [named] if named in LIBRARIES else []
    if named == "auto" and terms and _sharded(recipe) is None:
        possible = [name for name in LIBRARIES if _absent(name, device) is None]
    for name in possible:
        misfits = [reason for term in terms if (reason := _misfit(name, term)) is not None]
        if not misfits:
            console.note(f"cross-entropy by {name}")
            return name
        if name == named:
            raise ConfigError(
                f"train.fused_loss {named!r}: {misfits[0]}",
                hint="train.fused_loss=auto uses a library that fits, or the chunked code",
            )
    return None


def _heads_learn_tokens(recipe: TrainRecipe) -> bool:
    return recipe.train.loss == "cross_entropy"


def _base_learns_tokens(recipe: TrainRecipe) -> bool:
    return recipe.stage == "medusa2" and recipe.joint_options.distill_share == 0


def _sharded(recipe: TrainRecipe) -> str | None:
    """Why it cannot run under ZeRO-3: the libraries keep weights for the backward pass."""
    if recipe.deepspeed.enabled and recipe.deepspeed.zero_stage == 3:
        return "zero_stage 3 releases weights between the forward and the backward pass"
    return None


def _absent(library: str, device: torch.device) -> str | None:
    """Why the library does not run on this machine."""
    package = LIBRARIES[library].module.partition(".")[0]
    if device.type != "cuda":
        return f"it runs on CUDA only, and the device is {device.type}"
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return f"it needs compute capability 8.0; {name} has less"
    try:
        function = _function(library)
    except Exception as error:  # they look for Triton, compilers and devices
        return f"the package {package} cannot be imported: {error}"
    if missing := set(LIBRARIES[library].accumulators) - set(
        inspect.signature(function).parameters
    ):
        return (
            f"the package {package}, as installed, sums gradients in the 16 bits of their tensors "
            f"(no {', '.join(sorted(missing))})"
        )
    return None


def _misfit(library: str, columns: Columns | None) -> str | None:
    """Why the library cannot compute this projection."""
    dtypes, knows_bias = LIBRARIES[library].dtypes, LIBRARIES[library].knows_bias
    if columns is None:
        return "the projection is not a plain Linear"
    if columns.weight_RD.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(columns.weight_RD.dtype).removeprefix("torch.")
        return f"the projection is in {found}, expected one of {known}"
    if columns.bias_R is not None and not knows_bias:
        return "the projection has a bias, which it does not support"
    if not isinstance(columns.scale, LogitScale):
        return "the base changes its logits in a way that it does not support"
    return None
