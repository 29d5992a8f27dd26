"""The header of a GGUF file: read without mapping the file or reading a tensor, and checked.

A length or count from a file is never trusted: what it announces must lie inside the file and below
the limits here before it is read.
"""

import functools
import io
import struct
from collections.abc import Container
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from medusa_kit.base.gguf_files.types import TYPES, UNREAD, BlockType
from medusa_kit.errors import CheckpointError
from medusa_kit.store.records import settled_stamp

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
MAX_VALUES, MAX_TENSORS, MAX_ARRAY = 1 << 16, 1 << 17, 1 << 22
MAX_NAME, MAX_TEXT, MAX_HEADER = (1 << 16) - 1, 1 << 24, 1 << 28
MAX_ALIGNMENT, MAX_DIMS, MAX_KEPT = 1 << 16, 4, 4096
MIN_VALUE_SIZE, MIN_TENSOR_SIZE = 13, 33  # bytes of the smallest possible entry
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}  # fmt: skip
UINT32, STRING, ARRAY = 4, 8, 9
AGAIN = "the file is damaged or cut off; download it again"
PIECE = 1 << 20


class Array(NamedTuple):
    """A long array, or one of strings, which is skipped."""

    kind: int
    length: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in the header. `shape`: outermost dimension first, as in torch."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int  # from the beginning of the file
    size: int


@dataclass(frozen=True)
class Header:
    path: Path
    values: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    places: dict[str, tuple[int, int]]  # where each value begins, with its name, and ends


def read_header(path: Path, whole: Container[str] = ()) -> Header:
    """Read and check the header. `whole`: keys of arrays that are kept however long they are.

    Raises CheckpointError for a file that is cut off, damaged or of types nothing here reads.
    """
    try:
        stamp = None if whole else settled_stamp(path)
        return _read(path, whole) if stamp is None else _read_cached(path, stamp)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="check the path") from error


@functools.lru_cache(maxsize=16)
def _read_cached(path: Path, stamp: tuple[Any, ...]) -> Header:
    """The header of a file that has not changed, read once: a load needs it several times, and its
    thousands of texts take a while."""
    return _read(path)


def _read(path: Path, whole: Container[str] = ()) -> Header:
    with path.open("rb") as stream:
        size = stream.seek(0, io.SEEK_END)
        return _Reader(path, stream, size, whole).header()


class _Reader:
    """Reads from the beginning on, a piece at a time."""

    def __init__(self, path: Path, stream: Any, size: int, whole: Container[str] = ()) -> None:
        self.path, self.stream, self.size, self.whole = path, stream, size, whole
        self.position = 0
        self._piece, self._start = b"", 0

    def header(self) -> Header:
        if (magic := self.take(min(4, self.size), "the magic number")) != MAGIC:
            raise self.wrong(f"begins with {magic!r}; expected {MAGIC!r}", "is it a GGUF file?")
        version = self.number("I", "the version")
        if version not in VERSIONS:
            turned = version & 0xFFFF == 0
            raise self.wrong(
                f"has version {version}; expected {' or '.join(map(str, VERSIONS))}",
                "it was written for big-endian processors" if turned else "convert it anew",
            )
        num_tensors = self.number("Q", "the number of tensors")
        num_values = self.number("Q", "the number of values")
        self.limit("tensors", num_tensors, MAX_TENSORS, MIN_TENSOR_SIZE)
        self.limit("values", num_values, MAX_VALUES, MIN_VALUE_SIZE)
        values: dict[str, Any] = {}
        places: dict[str, tuple[int, int]] = {}
        for _ in range(num_values):
            start = self.position
            key = self.name("a value's name")
            if key in values:
                raise self.wrong(f"has the value {key!r} twice; expected it once")
            values[key] = self.value(key, self.number("I", f"the type of {key}"))
            places[key] = start, self.position
        tensors = self._tensors(num_tensors, self._alignment(values))
        return Header(self.path, values, tensors, places)

    def _alignment(self, values: dict[str, Any]) -> int:
        alignment = values.get("general.alignment", ALIGNMENT)
        power = isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0
        if not power or alignment > MAX_ALIGNMENT:
            raise self.wrong(
                f"has general.alignment {alignment!r}; expected a power of two up to "
                f"{MAX_ALIGNMENT}"
            )
        return int(alignment)

    def _tensors(self, count: int, alignment: int) -> tuple[TensorInfo, ...]:
        entries = [self._tensor(alignment) for _ in range(count)]
        begin = -(-self.position // alignment) * alignment
        tensors = [
            TensorInfo(entry.name, entry.shape, entry.kind, begin + entry.offset, entry.size)
            for entry in entries
        ]
        if len({entry.name for entry in tensors}) < count:
            names = [entry.name for entry in tensors]
            twice = next(name for name in names if names.count(name) > 1)
            raise self.wrong(f"has the tensor {twice!r} twice; expected it once")
        self._check_offsets(tensors)
        return tuple(tensors)

    def _check_offsets(self, tensors: list[TensorInfo]) -> None:
        previous: TensorInfo | None = None
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            end = tensor.offset + tensor.size
            if end > self.size:
                raise self.wrong(
                    f"is cut off: its tensor {tensor.name!r} ends at byte {end}, "
                    f"the file at byte {self.size}"
                )
            if previous is not None and previous.offset + previous.size > tensor.offset:
                raise self.wrong(
                    f"has the tensor {tensor.name!r} at byte {tensor.offset}, inside "
                    f"{previous.name!r}, which ends at byte {previous.offset + previous.size}"
                )
            previous = tensor

    def _tensor(self, alignment: int) -> TensorInfo:
        """Read an entry, whose `offset` is still from the beginning of the tensors' data."""
        name = self.name("a tensor's name")
        num_dims = self.number("I", f"the dimensions of {name}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.wrong(f"has {name!r} with {num_dims} dimensions; expected 1 to {MAX_DIMS}")
        dims = [self.number("Q", f"the shape of {name}") for _ in range(num_dims)]
        kind = self._kind(name, self.number("I", f"the type of {name}"))
        if not all(dims) or dims[0] % kind.numbers:
            raise self.wrong(
                f"has {name!r} of shape {dims[::-1]}; expected rows of a multiple of "
                f"{kind.numbers} numbers for {kind.name}, and no dimension of 0"
            )
        offset = self.number("Q", f"the place of {name}")
        if offset % alignment:
            raise self.wrong(
                f"has {name!r} at {offset} of its data; expected a multiple of {alignment}"
            )
        size = prod(dims) // kind.numbers * kind.size
        return TensorInfo(name, tuple(reversed(dims)), kind.name, offset, size)

    def _kind(self, name: str, number: int) -> BlockType:
        if number in TYPES:
            return TYPES[number]
        called = f"{UNREAD[number]}, which is not read" if number in UNREAD else "which is unknown"
        known = ", ".join(kind.name for kind in TYPES.values())
        raise self.wrong(
            f"has the tensor {name!r} of type {number}, {called}; expected one of {known}",
            "convert the model to one of these types, Q4_K_M or Q8_0 for example",
        )

    def value(self, key: str, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], key)
        if kind == STRING:
            return self.text(key, MAX_TEXT)
        if kind != ARRAY:
            raise self.wrong(f"has {key!r} of type {kind}; expected 0 to 12")
        inner = self.number("I", f"the type of {key}")
        count = self.number("Q", f"the length of {key}")
        if inner not in NUMBERS and inner != STRING:
            raise self.wrong(f"has {key!r}, an array of type {inner}; expected numbers or strings")
        width = 8 if inner == STRING else struct.calcsize(f"<{NUMBERS[inner]}")
        self.limit(f"entries in {key!r}", count, MAX_ARRAY, width)
        if inner == STRING and key in self.whole:
            return tuple(self.text(f"an entry of {key!r}", MAX_NAME) for _ in range(count))
        if inner == STRING:
            self.skip_texts(count, key)
        elif count <= MAX_KEPT or key in self.whole:
            return struct.unpack(f"<{count}{NUMBERS[inner]}", self.take(count * width, key))
        else:
            self.skip(count * width, key)
        return Array(inner, count)

    def number(self, form: str, what: str) -> Any:
        form = f"<{form}"
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def name(self, what: str) -> str:
        name = self.text(what, MAX_NAME)
        if not name:
            raise self.wrong(f"lacks {what}; expected some text")
        return name

    def text(self, what: str, max_length: int) -> str:
        length = self.number("Q", what)
        if length > max_length:
            raise self.wrong(f"has {length} bytes for {what}; expected at most {max_length}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"has {what} that is not UTF-8") from error

    def skip_texts(self, count: int, what: str) -> None:
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            offset = self.position - self._start
            if offset + 8 > len(self._piece):
                offset = self._fill(8, what)
            self.position += 8 + length_of(self._piece, offset)[0]
        self.skip(0, what)

    def skip(self, count: int, what: str) -> None:
        self._inside(count, what)
        self.position += count

    def take(self, count: int, what: str) -> bytes:
        offset = self.position - self._start
        if offset + count > len(self._piece):
            offset = self._fill(count, what)
        self.position += count
        return self._piece[offset : offset + count]

    def _fill(self, count: int, what: str) -> int:
        """Read on, so that `count` bytes follow; returns the offset of the first in the piece."""
        self._inside(count, what)
        self.stream.seek(self.position)
        self._piece, self._start = self.stream.read(max(count, PIECE)), self.position
        if len(self._piece) < count:
            raise self.wrong(f"is cut off in {what}: it became shorter while it was read")
        return 0

    def _inside(self, count: int, what: str) -> None:
        if (end := self.position + count) > self.size:
            raise self.wrong(
                f"is cut off in {what}, which ends at byte {end}; the file ends at byte {self.size}"
            )
        if end > MAX_HEADER:
            raise self.wrong(f"has a header of more than {MAX_HEADER} bytes, up to {what}")

    def limit(self, what: str, count: int, max_count: int, min_size: int) -> None:
        """Raises CheckpointError for more than `max_count`, or than fit where each takes `min_size`
        bytes."""
        if count > max_count or count * min_size > self.size - self.position:
            room = (self.size - self.position) // min_size
            raise self.wrong(f"announces {count} {what}; expected at most {min(max_count, room)}")

    def wrong(self, what: str, hint: str = AGAIN) -> CheckpointError:
        return CheckpointError(f"{self.path.name} {what}", hint=hint)
