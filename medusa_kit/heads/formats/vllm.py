"""vLLM's Medusa folder: `blocks.0.layers.0.weight`, `lm_heads.0.weight`, and a config with traps.

Biases exist only where the config sets `medusa_fc_bias`, and one matrix for all heads,
`lm_head.weight`, where it sets `original_lm_head`. A `token_map` is used only where
`truncated_vocab_size` is below `vocab_size`. vLLM takes any key with "num" and "heads" in it for
the number of heads, and silently drops tensors whose names it does not know.

Shapes: R rows of a vocabulary matrix.
"""

import json
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.errors import CheckpointError
from medusa_kit.heads.formats.files import TensorFiles, whole_number
from medusa_kit.heads.formats.layout import (
    Layout,
    Names,
    read_blocks,
    read_matrices,
    sort_names,
)
from medusa_kit.heads.formats.neutral import ForeignHeads
from medusa_kit.heads.formats.target import Target, Written, same_numbers

START = r"(?:medusa_heads\.)?"  # vLLM cuts it off first
ORIGINAL, TOKEN_MAP = "lm_head.weight", "token_map"
WEIGHTS = "model.safetensors"
# vLLM makes token_map a parameter, does not load it, and then refuses to start without it.
NOT_TRACKED = {"enable_weights_track": False}
NOT_TRACKED_NOTE = (
    "vLLM (0.32) loads a token_map only with its check for missing weights switched off; it then "
    "starts even if heads are missing, so look at its acceptance"
)
LAYOUT = Layout(
    re.compile(START + r"blocks\.(?P<head>\d+)\.layers\.(?P<block>\d+)\.(?P<kind>weight|bias)"),
    re.compile(START + r"lm_heads\.(?P<head>\d+)\.weight"),
)


def read(files: TensorFiles, config: dict[str, Any], extras: frozenset[str]) -> ForeignHeads:
    special = {name.removeprefix("medusa_heads."): name for name in files.names}
    special = {short: name for short, name in special.items() if short in (ORIGINAL, TOKEN_MAP)}
    names = sort_names(LAYOUT, files.names, extras | frozenset(special.values()))
    has_bias = any(kind == "bias" for _, _, kind in names.blocks)
    _check_bias(files, config, has_bias)
    blocks = read_blocks(files, names, bias=has_bias)
    matrices = _read_matrices(files, config, names, special, blocks)
    token_map_R = files.get(special[TOKEN_MAP]) if TOKEN_MAP in special else None
    heads = ForeignHeads("vllm", blocks, matrices, vocab_size=whole_number(config, "vocab_size"))
    if config.get("logit_scale", 1.0) != 1.0:
        heads = replace(
            heads, notes=(f"the config's logit_scale {config['logit_scale']} is dropped: it does "
                          "not change the order of draft tokens",)
        )  # fmt: skip
    return _with_token_map(heads, token_map_R, config)


def _check_bias(files: TensorFiles, config: dict[str, Any], has_bias: bool) -> None:
    has_bias_by_config = bool(config.get("medusa_fc_bias", False))
    if has_bias_by_config and not has_bias:
        raise CheckpointError(
            f"{files.folder}: the config sets medusa_fc_bias, but the file holds no bias",
            hint="the checkpoint is incomplete, or the config should not set it",
        )
    if has_bias and not has_bias_by_config:
        console.warn(
            f"{files.folder}: the file's biases are used, but vLLM ignores them, since the config "
            "does not set medusa_fc_bias"
        )


def _read_matrices(
    files: TensorFiles,
    config: dict[str, Any],
    names: Names,
    special: dict[str, str],
    blocks: list[Any],
) -> list[Tensor] | Tensor:
    shared = special.get(ORIGINAL)
    if shared is not None and names.matrices:
        raise CheckpointError(
            f"{files.folder} holds both {shared} and {sorted(names.matrices.values())[0]}: one "
            "matrix for all heads or one for each, not both"
        )
    if shared is None and names.num_heads > 1 and set(names.matrices) == {0}:
        shared = names.matrices[0] if config.get("original_lm_head") else None
    if shared is not None:
        shared_names = Names(matrices={0: shared}, num_heads=1)
        matrices = read_matrices(files, shared_names, blocks)
        assert matrices is not None
        return matrices[0]
    own_matrices = read_matrices(files, names, blocks)
    if own_matrices is None:
        raise CheckpointError(f"{files.folder} holds no vocabulary matrix for its heads")
    return own_matrices


def _with_token_map(
    heads: ForeignHeads, token_map_R: Tensor | None, config: dict[str, Any]
) -> ForeignHeads:
    """Matrices cut to the tokens of the map, as vLLM does when it loads them."""
    rows = len(heads.matrix_list()[0])
    vocab_size, cut_to = heads.vocab_size, whole_number(config, "truncated_vocab_size")
    if token_map_R is None:
        if cut_to is not None and vocab_size is not None and cut_to < vocab_size:
            raise CheckpointError(
                f"the config's truncated_vocab_size {cut_to} is below its vocab_size {vocab_size}, "
                "but the file holds no token_map"
            )
        return replace(heads, vocab_size=rows)
    whole = token_map_R.dtype in (torch.int32, torch.int64)
    if token_map_R.dim() != 1 or not whole or len(token_map_R.unique()) != len(token_map_R):
        raise CheckpointError(
            f"token_map has shape {tuple(token_map_R.shape)} and dtype {token_map_R.dtype}; "
            "expected a list of different token ids"
        )
    size = len(token_map_R)
    used = cut_to is not None and vocab_size is not None and cut_to < vocab_size
    if rows > size and not used:
        console.warn(
            f"the file's token_map of {size} tokens is not used: the config has no "
            f"truncated_vocab_size below vocab_size, and the matrices have {rows} rows"
        )
        return replace(heads, vocab_size=rows)
    largest = int(token_map_R.max()) if size else -1
    if rows < size or int(token_map_R.min()) < 0 or (rows > size and largest >= rows):
        raise CheckpointError(
            f"token_map has {size} ids up to {largest}, the matrices have {rows} rows"
        )
    if rows == size:
        return replace(heads, token_map_R=token_map_R.long())
    cut = [matrix_VD[token_map_R.long()] for matrix_VD in heads.matrix_list()]
    matrices = cut if isinstance(heads.matrices, list) else cut[0]
    return replace(heads, matrices=matrices, token_map_R=token_map_R.long(), vocab_size=rows)


def write(heads: ForeignHeads, target: Target) -> Written:
    """Heads that use the base's own matrix get one `lm_head.weight` for all.

    Raises CheckpointError for matrices of some tokens only that differ from head to head.
    """
    matrices = _as_loaded(target.matrices(heads), heads.token_map_R)
    bias = heads.has_bias
    tensors: dict[str, Tensor] = {}
    for i, blocks in enumerate(heads.blocks):
        for j, block in enumerate(blocks):
            tensors[f"blocks.{i}.layers.{j}.weight"] = block.weight_DD
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = block.bias_D
    if isinstance(matrices, list):
        tensors |= {f"lm_heads.{i}.weight": matrix for i, matrix in enumerate(matrices)}
    else:
        tensors[ORIGINAL] = matrices
    if heads.token_map_R is not None:
        tensors[TOKEN_MAP] = heads.token_map_R.long()
    sizes = target.sizes(replace(heads, matrices=matrices))
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": sizes["hidden_size"],
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_blocks,
        "vocab_size": sizes["vocab_size"],
        "truncated_vocab_size": None if heads.token_map_R is None else len(heads.token_map_R),
        "medusa_fc_bias": bias,
        "original_lm_head": not isinstance(matrices, list),
    }
    speculation = {
        "method": "medusa",
        "model": str(target.folder),
        "num_speculative_tokens": heads.num_heads,
    }
    command = ["vllm", "serve", target.loadable_base or "BASE", "--speculative-config",
               json.dumps(speculation, separators=(",", ":"))]  # fmt: skip
    written = Written(config, {WEIGHTS: tensors}, command=command)
    if heads.token_map_R is not None:
        command += ["--model-loader-extra-config", json.dumps(NOT_TRACKED, separators=(",", ":"))]
        written.notes.append(NOT_TRACKED_NOTE)
    return written


def _as_loaded(matrices: list[Tensor] | Tensor, token_map_R: Tensor | None) -> Any:
    """Matrices as vLLM loads them: it cuts a matrix for all heads to the map, but expects a head's
    own matrix to have one row for each token of the vocabulary.
    """
    if token_map_R is None or not isinstance(matrices, list):
        return matrices
    if all(same_numbers(matrix_RD, matrices[0]) for matrix_RD in matrices):
        return matrices[0]
    raise CheckpointError(
        f"each of the {len(matrices)} heads has a matrix of its own for {len(token_map_R)} tokens; "
        "vLLM (0.32) loads such matrices only with a row for every token of the vocabulary",
        hint="heads of projection reduced (one matrix for all) or own (every token) can be served",
    )
