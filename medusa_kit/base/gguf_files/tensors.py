"""Tensors of a GGUF file, mapped one at a time.

They have the names and forms of the gguf package's `ReaderTensor`, without its reader: that takes
seconds for a tokenizer's arrays, and trusts the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medusa_kit.base.gguf_files.header import TensorInfo
from medusa_kit.base.gguf_files.parts import GGUFModel

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


def tensors_of(model: GGUFModel) -> list[StoredTensor]:
    """The tensors of all parts."""
    return [StoredTensor(part, info) for part, info in model.tensors.values()]
