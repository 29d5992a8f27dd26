"""Conversion between the neutral form and our own heads, without a change in any logit.

Foreign heads carry no fingerprint of their base. Their sizes are checked; that the base is the
right one is up to the user.

Shapes: D hidden, V vocabulary, R rows of a vocabulary matrix.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.faults.finite import check_fit
from medusa_kit.base.files import lasting_name
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import CheckpointError, IncompatibleBaseError
from medusa_kit.heads.config import HeadsConfig
from medusa_kit.heads.formats.engines import OWN_NAME
from medusa_kit.heads.formats.neutral import Block, ForeignHeads
from medusa_kit.heads.formats.target import same_numbers
from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.undrawn import Undrawn

KIT_FORMAT = OWN_NAME


def check_sizes(heads: ForeignHeads, base: BaseModel) -> None:
    """Raises IncompatibleBaseError for heads of another hidden size or vocabulary."""
    info, rows = base.info, None
    if heads.token_map_R is None:
        rows = len(heads.matrix_list()[0]) if heads.matrices is not None else None
    vocab_size = rows or heads.vocab_size or info.vocab_size
    differing = [
        f"{name} {head_size} ≠ {base_size}"
        for name, head_size, base_size in (
            ("hidden size", heads.hidden_size, info.hidden_size),
            ("vocabulary size", vocab_size, info.vocab_size),
        )
        if head_size != base_size
    ]
    if heads.token_map_R is not None and int(heads.token_map_R.max()) >= info.vocab_size:
        differing.append(f"token id {int(heads.token_map_R.max())} ≥ {info.vocab_size} tokens")
    if differing:
        raise IncompatibleBaseError(
            f"these {heads.format} heads do not fit {info.name!r}: {'; '.join(differing)} "
            "(heads ≠ base; a vocabulary is the rows of the output embedding)",
            hint="load the base they were trained on"
            + (f": {heads.base_name}" if heads.base_name else ""),
        )


def scale_note(base: BaseModel) -> str | None:
    """A note on what the base's logit scale means for heads elsewhere; None without a scale.

    No format carries one. A positive scale and a soft cap keep the order of draft tokens.
    Raises CheckpointError for a scale that reverses it.
    """
    scale = base.scale_logits
    if scale.factor == 1 and scale.divisor == 1 and scale.cap is None:
        return None
    if not scale.factor / scale.divisor > 0 or not (scale.cap is None or scale.cap > 0):
        raise CheckpointError(
            f"the logits of {base.info.name!r} are multiplied by "
            f"{scale.factor / scale.divisor:g}: other formats of heads have no scale, and this "
            "one changes the order of draft tokens"
        )
    return (
        f"{base.info.name} scales or caps its logits, which no foreign format records: the order "
        "of the heads' draft tokens stays the same, their probabilities do not"
    )


def simplified(heads: ForeignHeads, base: BaseModel) -> ForeignHeads:
    """The heads, without matrices where these are equal to the base's own rows."""
    bias = getattr(base.own_output, "bias", None)
    if heads.matrices is None or (bias is not None and bool(bias.any())):
        return heads
    weight_RD = base.own_output.weight.detach().cpu()
    if heads.token_map_R is not None:
        weight_RD = weight_RD[heads.token_map_R]
    if all(same_numbers(matrix_RD, weight_RD) for matrix_RD in heads.matrix_list()):
        return replace(heads, matrices=None)
    return heads


def to_kit(heads: ForeignHeads, base: BaseModel) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Our config and tensors, the latter in the dtypes they were stored in. Sizes must fit."""
    check_sizes(heads, base)
    heads = _in_order(simplified(heads, base))
    tensors: dict[str, Tensor] = {}
    for i, blocks in enumerate(heads.blocks):
        for j, block in enumerate(blocks):
            tensors[f"blocks.{i}.{j}.linear.weight"] = block.weight_DD
            tensors[f"blocks.{i}.{j}.linear.bias"] = block.bias_D
    if heads.matrices is not None:
        tensors |= _own(heads, base)
    ids_R = heads.token_map_R
    if ids_R is not None:
        tensors["column_ids"] = ids_R
    info, ours = base.info, heads.format == KIT_FORMAT
    config = HeadsConfig(
        num_heads=heads.num_heads,
        num_blocks=heads.num_blocks,
        projection="own"
        if heads.matrices is not None
        else "shared"
        if ids_R is None
        else "reduced",
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        reduced_size=None if ids_R is None else len(ids_R),
        base_model_name=lasting_name(info.name, info.source),
        base_model_revision=info.revision,
        base_model_type=info.model_type,
        base_fingerprint=info.fingerprint,
        base_quantized=info.quantized,
        encoding=heads.encoding if ours else base.encoding,
        base_config=heads.base_config if ours else base.computation,
    )
    return config, tensors


def _own(heads: ForeignHeads, base: BaseModel) -> dict[str, Tensor]:
    """Projections, with biases of zeros where the base's output embedding has a bias."""
    matrices = heads.matrix_list()
    if len(matrices) == 1:
        matrices = matrices * heads.num_heads
    tensors = {f"projections.{i}.weight": matrix for i, matrix in enumerate(matrices)}
    if getattr(base.own_output, "bias", None) is not None:
        for i, matrix_RD in enumerate(matrices):
            tensors[f"projections.{i}.bias"] = matrix_RD.new_zeros(len(matrix_RD))
    return tensors


def _in_order(heads: ForeignHeads) -> ForeignHeads:
    """The heads with token map and rows sorted, since our columns ascend in token id."""
    if heads.token_map_R is None:
        return heads
    ids_R, order_R = heads.token_map_R.sort()
    matrices: Any = heads.matrices
    if isinstance(matrices, list):
        matrices = [matrix_RD[order_R] for matrix_RD in matrices]
    elif matrices is not None:
        matrices = matrices[order_R]
    return replace(heads, token_map_R=ids_R, matrices=matrices)


def loaded(heads: ForeignHeads, base: BaseModel, folder: Path) -> MedusaHeads:
    """The heads of `folder` on `base`, in its dtype and on its device, ready to draft."""
    config, tensors = to_kit(heads, base)
    note = scale_note(base)
    check_fit(folder, tensors, base.dtype)
    with Undrawn():
        result = MedusaHeads(config, base, tensors.get("column_ids"))
    result.use(tensors)
    named = f"; their config names {heads.base_name!r}" if heads.base_name else ""
    console.note(
        f"heads in format {heads.format} ({heads.describe()}), converted in memory. They carry no "
        f"fingerprint: that they belong to {base.info.name!r} could not be verified, their sizes "
        f"fit{named}"
    )
    for line in (*heads.notes, *([note] if note else [])):
        console.note(line)
    if heads.adapter:
        console.warn(
            "the heads were trained with a LoRA adapter that this base lacks: text stays exact, "
            "acceptance may be lower"
        )
    return result


def from_kit(config: HeadsConfig, tensors: dict[str, Tensor]) -> ForeignHeads:
    """Our heads of kind `medusa` in the neutral form, for a format that `engines.check_shape` let
    pass. Raises CheckpointError for biases."""
    blocks = [
        [
            Block(tensors[f"blocks.{i}.{j}.linear.weight"], tensors[f"blocks.{i}.{j}.linear.bias"])
            for j in range(config.num_blocks)
        ]
        for i in range(config.num_heads)
    ]
    matrices = None
    if config.projection == "own":
        matrices = [tensors[f"projections.{i}.weight"] for i in range(config.num_heads)]
        for i in range(config.num_heads):
            bias_R = tensors.get(f"projections.{i}.bias", torch.zeros(1, dtype=torch.float32))
            if bias_R.any():
                raise CheckpointError(
                    f"projections.{i}.bias is not zero, and no vocabulary matrix of a Medusa "
                    "format has a bias"
                )
    return ForeignHeads(
        KIT_FORMAT,
        blocks,
        matrices,
        tensors.get("column_ids"),
        config.vocab_size,
        config.base_model_name,
        encoding=config.encoding,
        base_config=config.base_config,
    )
