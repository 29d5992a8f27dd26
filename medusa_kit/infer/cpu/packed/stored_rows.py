"""Rows of a GGUF file as they lie there, which C++ packs without making numbers of them.

What comes of it is what `packing` makes of the same weights as `Blocks`, byte for byte.

Shapes: O outputs, I inputs.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_kit.infer.cpu.binding import kernels

TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
NOT_FINITE, NOT_HALVES, FIVE_BITS = 1, 2, 4  # mirrored from packing.cpp
LANES = 16
PIECE = 1 << 21  # numbers that are expanded at a time: they stay in the processor's cache


@dataclass(frozen=True)
class StoredRows:
    """`places_O`: addresses of the rows, 0 for one of zeros; `kept` holds what they lie in.
    `halves`: whether 16 bits hold all scales and offsets. `others`: these rows as `Blocks` or
    numbers, for forms that their type alone does not lead to."""

    stored: str
    places_O: Tensor
    inputs: int
    halves: bool
    kept: tuple[Any, ...]
    others: Callable[[], Any]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.places_O), self.inputs

    def packed_into(self, data: Tensor, kind: int) -> Tensor:
        """Fill `data`, which has the shape of a packed matrix of `kind`."""
        places_O = torch.zeros(len(data) * LANES, dtype=torch.int64)
        places_O[: len(self.places_O)] = self.places_O
        self._call("mk_pack", places_O, kind, data)
        return data

    def numbers(self) -> Iterator[Tensor]:
        """All numbers in order, in bfloat16, in pieces."""
        for places_O in self.places_O.split(max(1, PIECE // self.inputs)):
            out = torch.empty(len(places_O) * self.inputs, dtype=torch.bfloat16)
            self._call("mk_expand", places_O, 0, out)
            yield out

    def _call(self, name: str, places_O: Tensor, kind: int, out: Tensor) -> None:
        _call(name, self.stored, places_O, self.inputs, kind, out)


def stored_rows(
    data_OB: np.ndarray, stored: str, inputs: int, order_O: Tensor, others: Callable[[], Any]
) -> StoredRows | None:
    """Rows that lie in `data_OB`, [O, bytes], in this order; None where C++ does not read them as
    they are. `others`: as of StoredRows."""
    if stored not in TYPES or data_OB.dtype != np.uint8 or not data_OB[0].flags.c_contiguous:
        return None
    places_O = data_OB.ctypes.data + order_O * data_OB.strides[0]
    found = _call("mk_stored_properties", stored, places_O, inputs)
    if found & NOT_FINITE or (stored == "Q5_K" and not found & FIVE_BITS):
        return None
    return StoredRows(stored, places_O, inputs, not found & NOT_HALVES, (data_OB,), others)


def like_rows(
    arrange: Callable[[list[Tensor]], Tensor],
    parts: Sequence[StoredRows],
    others: Callable[[], Any],
) -> StoredRows:
    """Rows of the parts, which are of one type, arranged."""
    return StoredRows(
        parts[0].stored,
        arrange([part.places_O[:, None] for part in parts])[:, 0],
        parts[0].inputs,
        all(part.halves for part in parts),
        tuple(kept for part in parts for kept in part.kept),
        others,
    )


def _call(
    name: str, stored: str, places_O: Tensor, inputs: int, kind: int = 0, out: Tensor | None = None
) -> int:
    library = kernels.load_library()
    assert library is not None
    places_O = places_O.contiguous()
    rows = kernels.StoredRows(
        TYPES[stored], kind, len(places_O), inputs, places_O.data_ptr(),
        0 if out is None else out.data_ptr(),
    )  # fmt: skip
    threads = kernels.threads_for(len(places_O) * inputs)
    return int(getattr(library, name)(ctypes.byref(rows), threads) or 0)
