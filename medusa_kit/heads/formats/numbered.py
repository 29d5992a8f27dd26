"""Heads in a file of their own, tensors named by numbers alone: `0.0.linear.weight`, `0.1.weight`.

FasterDecoding's first release (`fd-v1`), and the engines that took over its names: Hugging Face
TGI, LoRAX, and TensorRT-LLM's converter. Without the vocabulary matrices it is FasterDecoding's
version "2" (`fd-v2`), in which heads use the base's own matrix.

FasterDecoding's loaders repeat one block within a head (`[ResBlock(D)] * L`), so the last one read
replaces those before it. TGI, LoRAX and TensorRT-LLM make L blocks.
"""

from typing import Any

import torch

from medusa_kit import console
from medusa_kit.errors import CheckpointError
from medusa_kit.heads.formats.files import FD_FILES, TensorFiles
from medusa_kit.heads.formats.layout import dotted, read_blocks, read_matrices, sort_names
from medusa_kit.heads.formats.neutral import ForeignHeads
from medusa_kit.heads.formats.target import Target, Written, heads_config

LAYOUT = dotted()
SAFETENSORS = FD_FILES[0]
FD_HEADS = 5  # as many are made by FasterDecoding's main branch, whatever the config says


def read(files: TensorFiles, config: dict[str, Any], extras: frozenset[str]) -> ForeignHeads:
    names = sort_names(LAYOUT, files.names, extras)
    blocks = read_blocks(files, names)
    matrices = read_matrices(files, names, blocks)
    _warn_about_config(files, config, matrices is None)
    return ForeignHeads("fd-v2" if matrices is None else "fd-v1", blocks, matrices)


def _warn_about_config(files: TensorFiles, config: dict[str, Any], version_2: bool) -> None:
    path = files.folder / "config.json"
    version = str(config.get("version", "")).removesuffix(".0")
    version_found = "2" if version_2 else "1"
    if version and version != version_found:
        console.warn(
            f"{path}: version is {config['version']!r}, but the file's tensors are those of "
            f"version {version_found}: {version_found} is used"
        )
    for_tgi = "medusa_num_heads" in config and "base_model_name_or_path" in config
    if for_tgi and "architectures" in config:
        console.warn(
            f"{path} has the key `architectures`: TGI crashes on heads whose config has it "
            "(`medusa-kit convert --to tgi` writes none)"
        )


def _write(heads: ForeignHeads, target: Target, version: int) -> Written:
    matrices = target.full_matrices(heads) if version == 1 else []
    tensors = {}
    for i, blocks in enumerate(heads.blocks):
        for j, block in enumerate(blocks):
            tensors[f"{i}.{j}.linear.weight"] = block.weight_DD
            tensors[f"{i}.{j}.linear.bias"] = block.bias_D
        if matrices:
            tensors[f"{i}.{len(blocks)}.weight"] = matrices[i]
    config = {"base_model_name_or_path": target.required_base_name(), **heads_config(heads)}
    return Written(config, {SAFETENSORS: tensors})


def _check_blocks(heads: ForeignHeads, target: Target) -> None:
    """Raises CheckpointError for a head of several blocks that are not all the same."""
    for i, (first, *others) in enumerate(heads.blocks):
        if not all(
            torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)
        ):
            raise CheckpointError(
                f"head {i} has {heads.num_blocks} different blocks; in {target.format} they have "
                "to be the same, since FasterDecoding's loader repeats one block within a head",
                hint="these names for engines that make every block: --to tgi, lorax or trt-llm; "
                "or train heads with heads.num_blocks=1",
            )


def write_fd_v1(heads: ForeignHeads, target: Target) -> Written:
    _check_blocks(heads, target)
    written = _write(heads, target, 1)
    if heads.num_heads != FD_HEADS:
        written.notes.append(
            f"FasterDecoding's main branch makes {FD_HEADS} heads whatever the config says: with "
            f"{heads.num_heads} heads use its version v0.1"
        )
    written.notes.append(
        "FasterDecoding's own loader reads medusa_lm_head.pt only; pickles are not written here. "
        f"torch.save(load_file('{SAFETENSORS}'), 'medusa_lm_head.pt') makes one"
    )
    return written


def write_fd_v2(heads: ForeignHeads, target: Target) -> Written:
    target.require_version_2(heads, one_block=False)
    _check_blocks(heads, target)
    written = _write(heads, target, 2)
    written.config["version"] = "2"
    return written


def write_tgi(heads: ForeignHeads, target: Target) -> Written:
    """Writes no `architectures` into the config: with it TGI ignores the speculator and crashes."""
    written = _write(heads, target, target.version(heads, one_block=True))
    written.command = ["text-generation-launcher", "--model-id", str(target.folder)]
    return written


def write_lorax(heads: ForeignHeads, target: Target) -> Written:
    """Writes version 2, which LoRAX can choose for each request."""
    version = target.version(heads, one_block=True)
    written = _write(heads, target, version)
    written.config["version"] = float(version)
    if heads.adapter:
        written.files["adapter_model.safetensors"] = dict(heads.adapter)
        written.copies.append("adapter_config.json")
    return written


def write_trt_llm(heads: ForeignHeads, target: Target) -> Written:
    """Writes for TensorRT-LLM's convert_checkpoint.py, which needs the matrices (else KeyError)."""
    written = _write(heads, target, 1)
    written.command = [
        "python", "examples/medusa/convert_checkpoint.py",
        "--model_dir", target.loadable_base or "BASE", "--medusa_model_dir", str(target.folder),
        "--output_dir", "ENGINE_CHECKPOINT", "--num_medusa_heads", str(heads.num_heads),
        "--num_medusa_layers", str(heads.num_blocks), "--max_medusa_token_len", "63",
    ]  # fmt: skip
    return written
