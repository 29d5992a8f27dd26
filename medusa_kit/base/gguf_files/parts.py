"""All parts of a GGUF model: one file, or several named NAME-00001-of-00003.gguf and so on."""

import re
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from medusa_kit.base.gguf_files.architectures import IN_CPP
from medusa_kit.base.gguf_files.header import (
    ALIGNMENT,
    MAGIC,
    UINT32,
    Array,
    Header,
    TensorInfo,
    read_header,
)
from medusa_kit.base.gguf_files.types import TYPES
from medusa_kit.errors import CheckpointError

NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 1000
TOKENS = "tokenizer.ggml.tokens"
LISTS = (TOKENS, *(f"tokenizer.ggml.{name}" for name in ("scores", "token_type", "merges")))
VERSION = 3
JOINED = ".joined-"
LEFT_OVER = 86_400.0  # seconds


@dataclass(frozen=True)
class GGUFModel:
    """The headers of all parts; `values` are the first one's."""

    headers: tuple[Header, ...]

    @property
    def path(self) -> Path:
        return self.headers[0].path

    @property
    def parts(self) -> tuple[Path, ...]:
        return tuple(header.path for header in self.headers)

    @property
    def values(self) -> dict[str, Any]:
        return self.headers[0].values

    @property
    def tensors(self) -> dict[str, tuple[Path, TensorInfo]]:
        """Tensors by name: the part's path and the entry in its header."""
        return {
            tensor.name: (header.path, tensor)
            for header in self.headers
            for tensor in header.tensors
        }


def read_headers(path: Path) -> GGUFModel:
    """Read the headers of all parts. `path`: the file, or any part. Raises CheckpointError, which
    names a missing part."""
    requested = read_header(path)
    count = _count_value(requested, "split.count", 1)
    if count <= 1:
        return GGUFModel((requested,))
    headers = [
        requested if part.name == path.name else read_header(part)
        for part in _part_paths(path, count)
    ]
    for number, header in enumerate(headers):
        if description := _difference(header, number, count):
            raise CheckpointError(
                f"{header.path.name} says {description}; expected part {number} of {count}, from 0",
                hint="were parts of several models given each other's names?",
            )
    model = GGUFModel(tuple(headers))
    total = sum(len(header.tensors) for header in headers)
    announced = _count_value(headers[0], "split.tensors.count", total)
    if len(model.tensors) != total or announced != total:
        raise CheckpointError(
            f"the {count} parts of {path.name} hold {len(model.tensors)} tensors of different "
            f"names, {total} in all; expected {announced}",
            hint="the parts are not of one model; download them again",
        )
    return model


def _count_value(header: Header, key: str, otherwise: int) -> int:
    value = header.values.get(key, otherwise)
    if not isinstance(value, int) or value < 0:
        raise CheckpointError(
            f"{header.path.name} has {key} {value!r}; expected an integer, 0 or more",
            hint="the file is damaged; download it again",
        )
    return value


def _difference(header: Header, number: int, count: int) -> str | None:
    numbers = _count_value(header, "split.no", 0), _count_value(header, "split.count", 1)
    return None if numbers == (number, count) else f"that it is part {numbers[0]} of {numbers[1]}"


def _part_paths(path: Path, count: int) -> list[Path]:
    match = NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or count > MAX_PARTS:
        raise CheckpointError(
            f"{path.name} is one of {count} parts; expected a name like "
            f"NAME-00001-of-{min(count, MAX_PARTS):05}.gguf",
            hint="give the parts their names back",
        )
    paths = [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.name} is one of {count} parts, and {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} not next to it",
            hint="put all parts into one folder",
        )
    return paths


def stem(path: Path) -> str:
    """A file's name without its ending and number of a part."""
    match = NAME.fullmatch(path.name)
    return match["stem"] if match else path.stem


@contextmanager
def as_one_file(model: GGUFModel, folder: Path, weights: bool = True) -> Iterator[Path]:
    """The model in one file, for readers that know no parts: its own, or one in `folder` for the
    time being. Without `weights` that has a hole in their place, which takes no room, and mostly
    the vocabulary's size in place of its lists: transformers takes seconds to read them."""
    if len(model.headers) == 1 and weights:
        yield model.path
        return
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    with TemporaryDirectory(prefix=JOINED, dir=folder) as temporary:
        target = Path(temporary) / f"{stem(model.path)}.gguf"
        with target.open("wb") as stream:
            _join(model, stream, weights)
        yield target


def _remove_leftovers(folder: Path) -> None:
    """Those of killed processes. Nobody reads one for as long as LEFT_OVER."""
    for leftover in folder.glob(f"{JOINED}*"):
        with suppress(OSError):  # another process removes it too
            if time.time() - leftover.stat().st_mtime > LEFT_OVER:
                shutil.rmtree(leftover)


def _join(model: GGUFModel, stream: Any, weights: bool) -> None:
    first, tensors = model.headers[0], model.tensors.values()
    alignment = first.values.get("general.alignment", ALIGNMENT)
    left_out, more = ((), []) if weights else _in_place_of_lists(first.values)
    kept = [place for key, place in first.places.items() if key not in left_out]
    stream.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(kept) + len(more)))
    with first.path.open("rb") as source:
        for start, end in kept:
            source.seek(start)
            stream.write(source.read(end - start))
    for key, number in more:
        stream.write(struct.pack("<Q", len(key)) + key.encode())
        stream.write(struct.pack("<II", UINT32, number))
    numbers = {kind.name: number for number, kind in TYPES.items()}
    offset = 0
    for _, tensor in tensors:
        name, dims = tensor.name.encode(), tensor.shape[::-1]
        stream.write(struct.pack("<Q", len(name)) + name)
        stream.write(struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        stream.write(struct.pack("<IQ", numbers[tensor.kind], offset))
        offset += -(-tensor.size // alignment) * alignment
    stream.seek(-(-stream.tell() // alignment) * alignment)
    begin = stream.tell()
    if weights:
        for part, tensor in tensors:
            with part.open("rb") as source:
                source.seek(tensor.offset)
                _copy(source, stream, tensor.size)
            stream.seek(-(stream.tell() - begin) % alignment, 1)
    stream.truncate(begin + offset)


def _in_place_of_lists(values: dict[str, Any]) -> tuple[Sequence[str], list[tuple[str, int]]]:
    """(names of the vocabulary's lists, values that a config needs instead), where C++ can run the
    model: of others transformers may read more of them."""
    kind, tokens = str(values.get("general.architecture")), values.get(TOKENS)
    if kind not in IN_CPP or not isinstance(tokens, Array | tuple):
        return (), []
    key, size = f"{kind}.vocab_size", tokens.length if isinstance(tokens, Array) else len(tokens)
    return LISTS, [] if key in values else [(key, size)]


def _copy(source: Any, target: Any, count: int) -> None:
    while count:
        piece = source.read(min(count, 1 << 24))
        if not piece:
            raise CheckpointError(
                f"{source.name} became shorter while it was read", hint="download it again"
            )
        target.write(piece)
        count -= len(piece)
