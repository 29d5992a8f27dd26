"""The blocks of a GGUF file: codes, scales and offsets that expand to the loaded float32 weights.

Blocks are used only if they expand to the weights bit for bit; otherwise wider weights are packed.

Shapes: O outputs, I inputs, Q groups of inputs.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_kit.base.gguf import cannot_write, origin_of, scales_file
from medusa_kit.base.gguf_files import scales
from medusa_kit.base.gguf_files.check import ARCHITECTURE, checked
from medusa_kit.base.gguf_files.tensors import tensors_of
from medusa_kit.infer.cpu.packed.packing import GROUPS, Blocks
from medusa_kit.store.builds import make_file_once


class GGUFBlocks:
    """Finds, by name, the blocks that a model's weights came from."""

    def __init__(self, path: Path) -> None:
        """`path`: a GGUF file. Its scales are kept in the cache folder."""
        self._scales, metadata = kept_scales(path)
        self._map = name_map(metadata["architecture"], int(metadata["layers"]))

    def find(
        self, name: str, weight_OI: Tensor, num_heads: int = 1, first: int = 0
    ) -> Blocks | None:
        """Blocks of the module called `name`, if any, for its rows from `first` on."""
        gguf_name = self._map and self._map.get_name(f"{name}.weight", try_suffixes=(".weight",))
        scales_OQ = self._scales.get(f"{gguf_name}.scales")
        offsets_OQ = self._scales.get(f"{gguf_name}.offsets")
        if scales_OQ is None or len(scales_OQ) < first + len(weight_OI):
            return None
        rows = slice(first, first + len(weight_OI))
        offsets_OQ = None if offsets_OQ is None else offsets_OQ[rows]
        return blocks_in_order(weight_OI, scales_OQ[rows], offsets_OQ, num_heads)


def blocks_in_order(
    weight_OI: Tensor,
    scales_OQ: Tensor,
    offsets_OQ: Tensor | None,
    num_heads: int = 1,
    factors: tuple[Tensor, ...] = (),
) -> Blocks | None:
    """Blocks with these scales that expand to the weights, if there are any. `num_heads`: of
    queries and keys, since GGUF interleaves the two halves of each head in Llama models.
    `factors`: as of Blocks.
    """
    if weight_OI.shape[1] % scales_OQ.shape[1]:
        return None
    for order in (slice(None), _halves_in_turn(len(weight_OI), num_heads)):
        ordered = None if offsets_OQ is None else offsets_OQ[order]
        if blocks := equal_blocks(weight_OI, scales_OQ[order], ordered):
            return replace(blocks, factors=tuple(factor[order] for factor in factors))
    return None


def name_map(architecture: str, num_layers: int) -> Any:
    """The gguf package's map from transformers' names to GGUF's; None for what it does not know."""
    import gguf

    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    known = by_name.get(architecture)
    return None if known is None else gguf.get_tensor_name_map(known, num_layers)


def kept_scales(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Scales and offsets of a GGUF file's blocks, and what the file is. Raises CheckpointError."""
    kept = scales_file(path)
    doing = f"reading the scales of {path.name}, once on this machine"
    try:
        return make_file_once(
            kept,
            "sha256",
            doing,
            lambda target: save_scales(path, target),
            _read_scales_file,
            origin_of(path),
            check=False,
        )
    except OSError as error:
        raise cannot_write(path, kept, error) from error


def _read_scales_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as stream:
        names = stream.keys()
        return {name: stream.get_tensor(name) for name in names}, stream.metadata()


def save_scales(path: Path, target: Path) -> None:
    """Write scales and offsets of a GGUF file's two-dimensional tensors, as safetensors."""
    from safetensors.torch import save_file

    model = checked(path)
    tensors: dict[str, Tensor] = {}
    for tensor in tensors_of(model):
        parts = read_scales(tensor, int(tensor.shape[1])) if len(tensor.shape) == 2 else None
        if parts is not None:
            named = zip(("scales", "offsets"), parts, strict=True)
            tensors |= {f"{tensor.name}.{name}": part for name, part in named if part is not None}
    layers = {int(name.split(".")[1]) for name in model.tensors if name.startswith("blk.")}
    metadata = {
        "architecture": str(model.values[ARCHITECTURE]),
        "layers": str(1 + max(layers, default=0)),
    }
    save_file(tensors, target, metadata)


def _halves_in_turn(rows: int, num_heads: int) -> Tensor:
    if rows % (2 * num_heads):
        return torch.arange(rows)
    return torch.arange(rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def read_scales(tensor: Any, rows: int) -> tuple[Tensor, Tensor | None] | None:
    """(scales_OQ, offsets_OQ or None) of a GGUF tensor, for the kinds known here; else None."""
    reader = READERS.get(tensor.tensor_type.name)
    if reader is None:
        return None
    size, read = reader
    parts = read(tensor.data.reshape(rows, -1, size))
    scales_OQ, offsets_OQ = (
        None if part is None else torch.from_numpy(part.reshape(rows, -1).astype(np.float32))
        for part in parts
    )
    assert scales_OQ is not None
    return scales_OQ, offsets_OQ


def read_factors(tensor: Any, rows: int) -> tuple[Tensor, ...]:
    """The factors [O, I / 256] of which its scales and offsets are multiples; none for kinds that
    have none, or whose forms here do not use them."""
    reader = FACTORS.get(tensor.tensor_type.name)
    if reader is None:
        return ()
    raw = tensor.data.reshape(rows, -1, READERS[tensor.tensor_type.name][0])
    return tuple(torch.from_numpy(part.reshape(rows, -1)) for part in reader(raw))


def equal_blocks(
    weight_OI: Tensor, scales_OQ: Tensor, offsets_OQ: Tensor | None = None
) -> Blocks | None:
    """Blocks with these scales that expand to the weights bit for bit; None if there are none."""
    blocks = blocks_of(weight_OI, scales_OQ, offsets_OQ)
    same = blocks.group in GROUPS and torch.equal(blocks.expand(), weight_OI)
    return blocks if same else None


def blocks_of(weight_OI: Tensor, scales_OQ: Tensor, offsets_OQ: Tensor | None) -> Blocks:
    """Blocks with the codes nearest to these weights under the given scales and offsets."""
    codes_OQS = weight_OI.view(*scales_OQ.shape, -1)
    if offsets_OQ is not None:
        codes_OQS = codes_OQS - offsets_OQ[..., None]
    inverse_OQ = torch.where(scales_OQ == 0, 0.0, 1 / scales_OQ)
    codes_OQS = (codes_OQS * inverse_OQ[..., None]).round_()
    return Blocks(codes_OQS.to(torch.int8).view(weight_OI.shape), scales_OQ, offsets_OQ)


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    return raw[..., at : at + 2].copy().view(np.float16).astype(np.float32)


def _q4_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    return _half(raw, 0), -8 * _half(raw, 0)


def _scale_only(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    return _half(raw, 0), None


def _scale_and_minimum(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    return _half(raw, 0), _half(raw, 2)


def _super_blocks(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Q4_K, Q5_K: eight groups of 32; their scales and minima are six bits times a factor."""
    from gguf.quants import Q4_K

    factors, minima = Q4_K.get_scale_min(raw[..., 4:16].reshape(-1, 12).copy())
    shape = (*raw.shape[:-1], 8)
    return (
        _half(raw, 0) * factors.reshape(shape).astype(np.float32),
        -(_half(raw, 2) * minima.reshape(shape).astype(np.float32)),
    )


def _q6_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    return _half(raw, 208) * raw[..., 192:208].copy().view(np.int8).astype(np.float32), None


READERS = {  # kind -> (bytes of a block, scales and offsets of its groups)
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _scale_and_minimum),
    "Q5_0": (22, _scale_only),
    "Q5_1": (24, _scale_and_minimum),
    "Q8_0": (34, _scale_only),
    "Q4_K": (144, _super_blocks),
    "Q5_K": (176, _super_blocks),
    "Q6_K": (210, _q6_k),
    **scales.READERS,
}
FACTORS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "Q4_K": lambda raw: [_half(raw, 0), -_half(raw, 2)],
    "Q6_K": lambda raw: [_half(raw, 208)],
}
