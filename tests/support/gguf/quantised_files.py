"""GGUF files of tiny models whose matrices have random blocks."""

from pathlib import Path

import gguf
import numpy as np

from support.gguf.blocks import random_rows
from support.gguf.tiny_files import tiny_model, write_model

KINDS = ("Q4_K", "Q6_K", "Q8_0", "IQ2_S")  # the last is dequantised on the host


def quantised(path: Path, architecture: str, kinds: tuple[str, ...] = KINDS) -> Path:
    """A file of a tiny model whose matrices of 256 columns have blocks of these kinds in turn."""
    model = tiny_model(architecture, hidden_size=256, head_dim=64)
    write_model(path, architecture, model)
    reader = gguf.GGUFReader(path)
    large = [one for one in reader.tensors if len(one.shape) > 1 and one.shape[0] == 256]
    raw = {
        one.name: (
            _blocks(kinds[number % len(kinds)], [int(n) for n in one.shape[:0:-1]]),
            kinds[number % len(kinds)],
        )
        for number, one in enumerate(large)
    }
    path.unlink()
    write_model(path, architecture, model, more=raw)
    return path


def _blocks(kind: str, shape: list[int]) -> np.ndarray:
    rows = random_rows(kind, int(np.prod(shape)), 256)
    return rows.reshape(*shape, -1)
