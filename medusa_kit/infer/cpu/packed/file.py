"""A file of arrays that is mapped, not read: several processes share its pages.

PREAMBLE   64 bytes: magic, version of the layout, where the header lies, its length and SHA-256
arrays     each at a multiple of 64 bytes
header     JSON: {"order": of bytes, "numbers": {...}, "arrays": {name: [dtype, shape, offset]}}

The header comes last, since what the arrays are is known when they have been written. At opening
the file's size and the header's digest are checked, and that arrays lie inside the file; their
contents are not read here.
"""

import hashlib
import json
import math
import mmap
import os
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from medusa_kit.files import parse_json
from medusa_kit.store.builds import NotUsable

FILE, DIGEST = "weights.packed", "weights.sha256"  # in a folder of the cache folder
MAGIC, LAYOUT = b"MKPACKED", 1
PREAMBLE = struct.Struct("<8s4sIQQ32s")
ALIGNMENT = 64
DTYPES = {
    name: getattr(torch, name) for name in ("uint8", "float16", "bfloat16", "float32", "int64")
}


class Sink(Protocol):
    """Takes arrays while they are made."""

    def write(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], parts: Iterable[Tensor]
    ) -> None:
        """Write an array. Parts are those of its first dimension, in order."""


class MemorySink:
    """Keeps arrays in memory."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}

    def write(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], parts: Iterable[Tensor]
    ) -> None:
        whole = torch.empty(tuple(shape), dtype=dtype)
        done = 0
        for part in parts:
            whole[done : done + len(part)] = part
            done += len(part)
        assert done == shape[0], f"{done} rows of {name}, expected {shape[0]}"
        self.arrays[name] = whole


class FileSink:
    """Writes them to a file, in a thread: the system takes as long to make room for a part as
    another one to be made."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._table = file, dict[str, Any]()
        self._thread = ThreadPoolExecutor(1)
        self._size, self._written = 0, Future[int]()
        self._written.set_result(0)
        self._put(bytes(PREAMBLE.size))

    def write(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], parts: Iterable[Tensor]
    ) -> None:
        offset = self._aligned()
        for part in parts:
            self._put(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        written = self._size - offset
        assert written == num_bytes(dtype, shape), f"{written} bytes of {name}"
        self._table[name] = [str(dtype).removeprefix("torch."), list(shape), offset]

    def finish(self, numbers: dict[str, Any]) -> None:
        """The disk is not waited for: its digest is compared until it is known to be there
        (`content_digest`)."""
        at = self._aligned()
        fields = {"order": sys.byteorder, "numbers": numbers, "arrays": self._table}
        header = json.dumps(fields).encode()
        self._put(header)
        self._thread.shutdown()
        self._written.result()
        self._file.seek(0)
        digest = hashlib.sha256(header).digest()
        self._file.write(PREAMBLE.pack(MAGIC, bytes(4), LAYOUT, at, len(header), digest))
        self._file.flush()

    def _aligned(self) -> int:
        self._put(bytes(-self._size % ALIGNMENT))
        return self._size

    def _put(self, data: bytes | memoryview) -> None:
        """Write on once what was put before is written: one part is in memory beside the next."""
        self._written.result()
        self._written = self._thread.submit(self._file.write, data)
        self._size += len(data)


def write_file(path: Path, write: Callable[[FileSink], dict[str, Any]]) -> None:
    """`write`: all arrays; returns the numbers that belong to them. Raises OSError."""
    with path.open("wb") as file:
        sink = FileSink(file)
        sink.finish(write(sink))


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return int(math.prod(shape)) * dtype.itemsize


def mapped(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(numbers, arrays) of a file; arrays must not be written to. Raises NotUsable, OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _header(file, size)
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that is not writable
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
    try:
        return header["numbers"], {
            name: _array(whole, *entry) for name, entry in header["arrays"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotUsable(f"its table of arrays is wrong: {error}") from error


def _header(file: BinaryIO, size: int) -> dict[str, Any]:
    preamble = file.read(PREAMBLE.size)
    if len(preamble) < PREAMBLE.size or not preamble.startswith(MAGIC):
        raise NotUsable("it does not begin as such a file")
    _, _, layout, at, length, digest = PREAMBLE.unpack(preamble)
    if layout != LAYOUT:
        raise NotUsable(f"its layout is version {layout}, expected {LAYOUT}")
    if at + length != size:
        raise NotUsable(f"it has {size} bytes, expected {at + length}")
    file.seek(at)
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise NotUsable("its header is damaged")
    header: dict[str, Any] = parse_json(text)
    if header.get("order") != sys.byteorder:
        raise NotUsable("it was made on a machine with another order of bytes")
    return header


def _array(whole: Tensor, dtype: str, shape: list[int], offset: int) -> Tensor:
    end = offset + num_bytes(DTYPES[dtype], shape)
    if min(shape, default=1) < 0 or offset % ALIGNMENT or not 0 < offset <= end <= len(whole):
        raise ValueError(f"an array from byte {offset} to {end} of {len(whole)}")
    return whole[offset:end].view(DTYPES[dtype]).view(shape)
