"""Heads under a prefix, in a model's own files or alone.

`medusa_head.`   `fd-merged`: inside the shards of a model that was trained with them
                 (FasterDecoding v1.0, axolotl, RTP-LLM); alone it is MLC-LLM's
`medusa_heads.`  `modelopt`: NVIDIA Model Optimizer, numbers nested under `medusa` in the config
"""

from typing import Any

from medusa_kit.heads.formats.files import TensorFiles
from medusa_kit.heads.formats.layout import (
    Layout,
    dotted,
    read_blocks,
    read_matrices,
    sort_names,
)
from medusa_kit.heads.formats.neutral import ForeignHeads
from medusa_kit.heads.formats.target import Target, Written, heads_config

HEAD, HEADS = "medusa_head.", "medusa_heads."
MERGED_LAYOUT, MODELOPT_LAYOUT = dotted(HEAD), dotted(HEADS)
WEIGHTS = "model.safetensors"


def read_merged(files: TensorFiles, config: dict[str, Any], extras: frozenset[str]) -> ForeignHeads:
    alone = all(name.startswith(HEAD) or name in extras for name in files.names)
    return _read("mlc" if alone else "fd-merged", MERGED_LAYOUT, files, extras)


def read_modelopt(
    files: TensorFiles, config: dict[str, Any], extras: frozenset[str]
) -> ForeignHeads:
    return _read("modelopt", MODELOPT_LAYOUT, files, extras)


def _read(name: str, layout: Layout, files: TensorFiles, extras: frozenset[str]) -> ForeignHeads:
    """The heads of a checkpoint; of the base's tensors only the names are read."""
    names = sort_names(layout, files.names, extras)
    blocks = read_blocks(files, names)
    matrices = read_matrices(files, names, blocks)
    in_a_model = any(not layout.own(tensor_name) for tensor_name in files.names)
    # Heads stored inside a model belong to that model.
    return ForeignHeads(name, blocks, matrices, base_name=str(files.folder) if in_a_model else None)


def write_mlc(heads: ForeignHeads, target: Target) -> Written:
    config = {"model_type": "medusa", **heads_config(heads), **target.sizes(heads)}
    tensors = _tensors(heads, target, HEAD)
    index = {name: WEIGHTS for name in tensors}
    return Written(config, {WEIGHTS: tensors}, index=index)


def write_modelopt(heads: ForeignHeads, target: Target) -> Written:
    config = {**target.sizes(heads), "medusa": heads_config(heads)}
    notes = ["Model Optimizer keeps heads with the base's tensors: copy these files to them, and "
             "`medusa` into their config"]  # fmt: skip
    return Written(config, {WEIGHTS: _tensors(heads, target, HEADS)}, notes=notes)


def _tensors(heads: ForeignHeads, target: Target, prefix: str) -> dict[str, Any]:
    tensors = {}
    for i, (blocks, matrix_VD) in enumerate(
        zip(heads.blocks, target.full_matrices(heads), strict=True)
    ):
        for j, block in enumerate(blocks):
            tensors[f"{prefix}{i}.{j}.linear.weight"] = block.weight_DD
            tensors[f"{prefix}{i}.{j}.linear.bias"] = block.bias_D
        tensors[f"{prefix}{i}.{len(blocks)}.weight"] = matrix_VD
    return tensors
