"""Tensors of a GGUF file, mapped one at a time.

They have the names and forms of the gguf package's `ReaderTensor`, without its reader: that takes
seconds for a tokenizer's arrays, and trusts the file.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_kit.base.gguf_files.header import TensorInfo
from medusa_kit.base.gguf_files.parts import GGUFModel
from medusa_kit.base.gguf_files.types import TYPES

PIECE = 1 << 16  # numbers that are dequantised at a time: they stay in the processor's cache
TYPES_BY_NAME = {kind.name: kind for kind in TYPES.values()}
PLAIN: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


@dataclass(frozen=True)
class StoredTensor:
    part: Path
    info: TensorInfo

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Innermost dimension first, as the file has it."""
        return self.info.shape[::-1]

    @property
    def tensor_type(self) -> Any:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType[self.info.kind]

    @property
    def data(self) -> np.ndarray:
        """Mapped: rows of numbers for F32 and F16, of bytes else."""
        kind = PLAIN.get(self.info.kind, np.dtype("u1"))
        columns = self.info.size // int(np.prod(self.info.shape[:-1])) // kind.itemsize
        shape = (*self.info.shape[:-1], columns)
        mapped = np.memmap(self.part, kind, "r", self.info.offset, shape)
        return mapped.view(np.ndarray)  # slices of a memmap are slow

    def numbers(self, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """A copy of some rows in float32, by the gguf package, on all of torch's threads."""
        from gguf import dequantize

        data = self.data[rows]
        if self.info.kind in PLAIN or not data.flags.c_contiguous or not data.size:
            return np.array(dequantize(data, self.tensor_type), np.float32)
        block = TYPES_BY_NAME[self.info.kind]
        pieces = data.reshape(-1, block.size)
        out = np.empty((len(pieces), block.numbers), np.float32)
        step = max(1, PIECE // block.numbers)

        def fill(first: int) -> None:
            piece = pieces[first : first + step].reshape(1, -1)
            out[first : first + step] = dequantize(piece, self.tensor_type).reshape(
                -1, block.numbers
            )

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(fill, range(0, len(pieces), step)))
        return out.reshape(*data.shape[:-1], -1)


def tensors_of(model: GGUFModel) -> list[StoredTensor]:
    """The tensors of all parts."""
    return [StoredTensor(part, info) for part, info in model.tensors.values()]
