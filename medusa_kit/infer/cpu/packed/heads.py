"""Heads' weights as the kernels read them: packed in memory or, for heads in a folder on a light
base, in a file of the cache folder that is mapped, as the base's is.

The file is named by all that it is made of: the heads' numbers and config, the base's weights, the
form of its output embedding, and the kit's version and code, which packs.

Shapes: O outputs, I inputs, D hidden, K heads.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.quantization import raw_bytes
from medusa_kit.base.remembered_checks import code_digest
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.blocks import GatedBlock
from medusa_kit.infer.cpu.packed.file import DIGEST, FILE, LAYOUT, FileSink, mapped, write_file
from medusa_kit.infer.cpu.packed.int8_weights import packed_rounded
from medusa_kit.infer.cpu.packed.model import chosen_rows, matrix_in
from medusa_kit.infer.cpu.packed.packing import LANES, PackedMatrix, interleaved
from medusa_kit.store.builds import NotUsable, Origin, make_file_once
from medusa_kit.store.records import cache_folder, short_digest
from medusa_kit.version import __version__

COLUMNS, INPUT, GAIN = "columns", "recurrent.input", "recurrent.gain"
Part = PackedMatrix | Tensor


class PackedHeads:
    """Matrices and vectors by their names."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self.matrices = {n: part for n, part in parts.items() if isinstance(part, PackedMatrix)}
        self.vectors = {n: part for n, part in parts.items() if isinstance(part, Tensor)}


def packed_heads(
    heads: MedusaHeads, output: PackedMatrix, folder: Path | None = None
) -> PackedHeads:
    """Copies of frozen heads' weights. `output`: the base's output embedding. `folder`: where the
    heads lie; None: they are not kept in a file."""
    if folder is not None and heads.base.is_light:  # others' weights may have been changed
        try:
            return _kept(heads, output, folder)
        except OSError:  # no place for a file
            pass
    return PackedHeads(dict(_parts(heads, output)))


def _kept(heads: MedusaHeads, output: PackedMatrix, folder: Path) -> PackedHeads:
    contents = _digest(heads)
    info = heads.base.info
    made_with = [__version__, LAYOUT, code_digest()]
    depends_on = [contents, info.fingerprint, info.weights, output.struct.kind, *made_with]
    name = f"{folder.resolve().name.lstrip('.')}-{short_digest(json.dumps(depends_on))}"
    return make_file_once(
        cache_folder() / "packed" / name / FILE,
        DIGEST,
        "packing heads, once on this machine",
        lambda path: write_file(path, lambda sink: _written(heads, output, sink)),
        lambda path: _opened(path, heads),
        Origin(folder, [contents]),
        getattr(heads.base, "check", False),
        announce=False,
    )


def _digest(heads: MedusaHeads) -> str:
    """The digest of heads' numbers and of what they mean."""
    config = heads.config
    meaning = (config.kind, config.projection, config.num_heads, config.num_blocks)
    digest = hashlib.sha256(json.dumps(meaning).encode())
    for name, tensor in sorted(heads.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


@torch.no_grad()
def _parts(heads: MedusaHeads, output: PackedMatrix) -> Iterator[tuple[str, Part]]:
    for name, linear in _linears(heads):
        yield name, packed_rounded(linear.weight, linear.bias)
    if heads.recurrent is not None:
        yield INPUT, packed_rounded(heads.recurrent.input.weight)
        for i, block in _gated(heads):
            both_OI = interleaved(block.w1.weight, block.w3.weight)
            yield f"recurrent.{i}.gate_up", packed_rounded(both_OI)
            yield f"recurrent.{i}.down", packed_rounded(block.w2.weight)
            yield f"recurrent.{i}.norm", block.norm.weight.detach().float().clone()
        yield GAIN, heads.recurrent.gain.detach().float().contiguous().clone()
    if heads.config.projection == "reduced":
        assert heads.column_ids is not None
        yield COLUMNS, chosen_rows(output, heads.column_ids)


def _sizes(heads: MedusaHeads) -> dict[str, tuple[int, ...]]:
    """The shape of each part."""
    shapes = {name: tuple(linear.weight.shape) for name, linear in _linears(heads)}
    if heads.recurrent is not None:
        shapes[INPUT] = tuple(heads.recurrent.input.weight.shape)
        shapes[GAIN] = tuple(heads.recurrent.gain.shape)
        for i, block in _gated(heads):
            mlp, hidden = block.w1.weight.shape
            shapes[f"recurrent.{i}.gate_up"] = (2 * -(-mlp // LANES) * LANES, hidden)
            shapes[f"recurrent.{i}.down"] = (hidden, mlp)
            shapes[f"recurrent.{i}.norm"] = (hidden,)
    if heads.config.projection == "reduced":
        shapes[COLUMNS] = (heads.num_columns, heads.config.hidden_size)
    return shapes


def _linears(heads: Any) -> Iterator[tuple[str, Any]]:
    """The names and layers that each head has for itself."""
    for k, head in enumerate(heads.blocks):
        for j, block in enumerate(head):
            yield f"blocks.{k}.{j}", block.linear
    for k, projection in enumerate(heads.projections):
        yield f"projections.{k}", projection


def _gated(heads: MedusaHeads) -> Iterator[tuple[int, GatedBlock]]:
    assert heads.recurrent is not None
    blocks = (block for block in heads.recurrent.blocks if isinstance(block, GatedBlock))
    return enumerate(blocks)


def _written(heads: MedusaHeads, output: PackedMatrix, sink: FileSink) -> dict[str, Any]:
    matrices: dict[str, list[int]] = {}
    for name, part in _parts(heads, output):
        data, bias = (part, None) if isinstance(part, Tensor) else (part.data, part.bias)
        sink.write(name, data.dtype, data.shape, [data])
        if bias is not None:
            sink.write(f"{name}.bias", bias.dtype, bias.shape, [bias])
        if isinstance(part, PackedMatrix):
            matrices[name] = [part.struct.kind, part.struct.outputs, part.struct.inputs]
    return {"matrices": matrices}


def _opened(path: Path, heads: MedusaHeads) -> PackedHeads:
    """Raises NotUsable, OSError."""
    numbers, arrays = mapped(path)
    try:
        parts: dict[str, Part] = {}
        for name, shape in _sizes(heads).items():
            entry = numbers["matrices"].get(name)
            parts[name] = arrays[name] if entry is None else matrix_in(arrays, name, *entry)
            actual = tuple(arrays[name].shape) if entry is None else tuple(entry[1:])
            if actual != shape:
                raise ValueError(f"{name} is {actual}, expected {shape}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotUsable(f"a part of it is missing or wrong: {error!r}") from error
    return PackedHeads(parts)
