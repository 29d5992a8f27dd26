"""The files of a cache of hidden states: safetensors whose headers list rows and have a checksum.

A shard that is cut off or whose bits have changed is reported and removed.

Shapes: P positions, D hidden, S likeliest tokens of the base.
"""

import hashlib
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa_kit import console
from medusa_kit.errors import WriteError, in_one_line
from medusa_kit.files import atomic_write, parse_json
from medusa_kit.train.processes import distributed

ROWS, CRC32 = "rows", "crc32"  # in a shard's header
UNREADABLE = (SafetensorError, OSError, KeyError, TypeError, ValueError)


class Shard(NamedTuple):
    """One file, open."""

    header: dict[str, str]
    rows: list[tuple[str, int]]  # digest and number of positions of each
    tensors: dict[str, Tensor]  # memory-mapped


def write_shard(
    folder: Path, rows: Sequence[tuple[str, int]], tensors: Mapping[str, Tensor]
) -> None:
    """Raises WriteError where it cannot be written."""
    listed = json.dumps(rows)
    name = hashlib.sha256(listed.encode()).hexdigest()[:16]
    header = {ROWS: listed, CRC32: _checksum(listed, tensors)}
    try:
        with atomic_write(folder / f"shard-{name}.safetensors") as temporary:
            save_file(dict(tensors), temporary, metadata=header)
    except OSError as error:
        raise WriteError(
            f"cannot write hidden states to {folder}: {in_one_line(error.__cause__ or error)}",
            hint="make room and run the same command again: finished shards are kept",
        ) from error


def _checksum(rows: str, tensors: Mapping[str, Tensor]) -> str:
    """The CRC-32 of a shard's contents, which takes little time beside reading the file."""
    crc = zlib.crc32(rows.encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def check_shards(folder: Path, requested: Collection[str]) -> None:
    """Compare the checksums of the shards that have requested rows; processes share the work.

    None is removed before all processes have listed the shards, or they would share them out
    differently and leave some unchecked.
    """
    own_shards = shard_files(folder)[distributed.rank() :: distributed.world()]
    damaged: dict[Path, str] = {}
    with console.progress("checking hidden states", len(own_shards), unit="shards") as bar:
        for path in own_shards:
            if why := _damage(path, requested):
                damaged[path] = why
            bar.advance(1)
    for part in distributed.gathered(damaged):
        for path, why in part.items():
            _remove_damaged(path, why)


def _damage(path: Path, requested: Collection[str]) -> str | None:
    """What is wrong with a shard, or None."""
    try:
        shard = _read_shard(path)
    except UNREADABLE as error:
        return f"it cannot be read: {error}"
    expected = shard.header.get(CRC32)
    if expected is None or not any(digest in requested for digest, _ in shard.rows):
        return None
    actual = _checksum(shard.header[ROWS], shard.tensors)
    return None if actual == expected else f"its checksum is {actual}, expected {expected}"


def _remove_damaged(path: Path, why: object) -> None:
    console.warn(f"{path} is damaged ({why}): its rows are computed again")
    path.unlink(missing_ok=True)


def _read_shard(path: Path) -> Shard:
    """Raises one of UNREADABLE."""
    with safe_open(path, framework="pt") as stream:
        header = stream.metadata()
        rows = [(digest, int(count)) for digest, count in parse_json(header[ROWS])]
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    return Shard(header, rows, tensors)


def read_shards(
    folder: Path, names: Collection[str]
) -> tuple[dict[str, tuple[int, int, int]], list[dict[str, Tensor]]]:
    """(digest -> (shard, first row, rows), the shards' tensors), of shards that have tensors of
    these names and no others."""
    rows_by_digest: dict[str, tuple[int, int, int]] = {}
    shards: list[dict[str, Tensor]] = []
    for path in shard_files(folder):
        try:
            shard = _read_shard(path)
        except UNREADABLE as error:
            _remove_damaged(path, error)
            continue
        if shard.tensors.keys() != set(names):  # of another run, whose index is lost
            continue
        start = 0
        for digest, count in shard.rows:
            rows_by_digest[digest] = (len(shards), start, count)
            start += count
        shards.append(shard.tensors)
    return rows_by_digest, shards
