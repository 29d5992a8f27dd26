"""Tensors of a GGUF file, mapped one at a time.

They have the names and forms of the gguf package's `ReaderTensor`, without its reader: that takes
seconds for a tokenizer's arrays, and trusts the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medusa_kit.base.gguf_files.header import TensorPlace
from medusa_kit.base.gguf_files.parts import GGUFModel

PLAIN: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


@dataclass(frozen=True)
class StoredTensor:
    part: Path
    place: TensorPlace

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Innermost dimension first, as the file has it."""
        return self.place.shape[::-1]

    @property
    def tensor_type(self) -> Any:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType[self.place.kind]

    @property
    def data(self) -> np.ndarray:
        """Mapped: rows of numbers for F32 and F16, of bytes else."""
        kind = PLAIN.get(self.place.kind, np.dtype("u1"))
        columns = self.place.size // int(np.prod(self.place.shape[:-1])) // kind.itemsize
        shape = (*self.place.shape[:-1], columns)
        mapped = np.memmap(self.part, kind, "r", self.place.offset, shape)
        return mapped.view(np.ndarray)  # slices of a memmap are slow


def tensors_of(model: GGUFModel) -> list[StoredTensor]:
    """Of all parts."""
    return [StoredTensor(part, place) for part, place in model.tensors.values()]
