"""The blocks of a GGUF file: codes, scales and offsets that expand to the loaded float32 weights.

Only what comes out equal, bit for bit, is used; anything else falls back to wider weights.

Shapes: O outputs, I inputs, Q groups of inputs.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_kit.infer.native.packing import Blocks


class GGUFBlocks:
    """Finds the blocks behind a model's weights by their names."""

    def __init__(self, path: Path) -> None:
        import gguf

        self._reader = gguf.GGUFReader(str(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        field = self._reader.get_field("general.architecture")
        architecture = str(field.contents()) if field else ""
        by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        count = 1 + max(
            (int(n.split(".")[1]) for n in self._tensors if n.startswith("blk.")), default=0
        )
        self._map: Any = None
        if architecture in by_name:
            self._map = gguf.get_tensor_name_map(by_name[architecture], count)

    def find(self, name: str, weight_OI: Tensor, num_heads: int = 1) -> Blocks | None:
        """Blocks of the module called `name`; `num_heads` for queries and keys, which GGUF's Llama
        stores with the halves of each head in turn.
        """
        gguf_name = self._map and self._map.get_name(f"{name}.weight", try_suffixes=(".weight",))
        tensor = self._tensors.get(gguf_name or "")
        if tensor is None or tuple(tensor.shape[::-1].tolist()) != tuple(weight_OI.shape):
            return None
        scales = read_scales(tensor, len(weight_OI))
        if scales is None:
            return None
        scales_OQ, offsets_OQ = scales
        for order in (slice(None), _halves_in_turn(len(weight_OI), num_heads)):
            ordered = None if offsets_OQ is None else offsets_OQ[order]
            blocks = blocks_of(weight_OI, scales_OQ[order], ordered)
            if torch.equal(blocks.expand(), weight_OI):
                return blocks
        return None


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
    scales, offsets = (
        None if part is None else torch.from_numpy(part.reshape(rows, -1).astype(np.float32))
        for part in parts
    )
    assert scales is not None
    return scales, offsets


def blocks_of(weight_OI: Tensor, scales_OQ: Tensor, offsets_OQ: Tensor | None) -> Blocks:
    """The codes that bring out these weights, if any do."""
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
    """Q4_K, Q5_K: eight groups of 32 with six-bit scales and minima of a scale and a minimum."""
    from gguf.quants import Q4_K

    scales, minima = Q4_K.get_scale_min(raw[..., 4:16].reshape(-1, 12).copy())
    shape = (*raw.shape[:-1], 8)
    return (
        _half(raw, 0) * scales.reshape(shape).astype(np.float32),
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
}
