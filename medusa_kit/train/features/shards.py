"""The files of a cache of hidden states: safetensors whose headers list rows, say what these were
made with, and have a checksum.

A shard that is cut off or whose bits have changed is reported and removed. One that was made with
something else, as copied from another cache, is refused.

Shapes: P positions, D hidden, S likeliest tokens of the base.
"""

import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa_kit import console
from medusa_kit.errors import IncompatibleBaseError, WriteError, in_one_line
from medusa_kit.files import atomic_write, parse_json
from medusa_kit.train.processes import distributed

ROWS, MADE_WITH, CRC32 = "rows", "made_with", "crc32"  # in a shard's header
OTHER_PLACE = "choose another train.cache_dir, or remove the folder"
UNREADABLE = (SafetensorError, OSError, KeyError, TypeError, ValueError)
UNFINISHED, OLD_SECONDS = ".shard-*.tmp", 600.0  # long after a process would have renamed it
# In words, how what a file was made with differs from what this run would make it with.
Differs = Callable[[Mapping[str, Any]], str]


class Shard(NamedTuple):
    """One file, open."""

    header: dict[str, str]
    rows: list[tuple[str, int]]  # digest and number of positions of each
    tensors: dict[str, Tensor]  # memory-mapped


class _Finding(NamedTuple):
    """What was found of one file that is not simply used."""

    kind: Literal["damaged", "other", "untold"]
    why: str


def write_shard(
    folder: Path,
    rows: Sequence[tuple[str, int]],
    tensors: Mapping[str, Tensor],
    made_with: Mapping[str, Any],
) -> None:
    """Raises WriteError where it cannot be written."""
    listed = json.dumps(rows)
    name = hashlib.sha256(listed.encode()).hexdigest()[:16]
    header = {ROWS: listed, MADE_WITH: json.dumps(made_with)}
    header[CRC32] = _checksum(header, tensors)
    try:
        with atomic_write(folder / f"shard-{name}.safetensors") as temporary:
            save_file(dict(tensors), temporary, metadata=header)
    except OSError as error:
        raise WriteError(
            f"cannot write hidden states to {folder}: {in_one_line(error.__cause__ or error)}",
            hint="make room and run the same command again: finished shards are kept",
        ) from error


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """The CRC-32 of a shard's contents, which takes little time beside reading the file."""
    crc = zlib.crc32((header[ROWS] + header.get(MADE_WITH, "")).encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left of a shard; what another run writes just now stays."""
    for path in folder.glob(UNFINISHED):
        with contextlib.suppress(FileNotFoundError):  # renamed by now, or removed by another run
            if time.time() - path.stat().st_mtime > OLD_SECONDS:
                path.unlink()


def check_shards(folder: Path, requested: Collection[str], differs: Differs) -> None:
    """Compare the checksums of the shards that have requested rows, and what all were made with;
    processes share the work.

    None is removed before all processes have listed the shards, or they would share them out
    differently and leave some unchecked. Raises IncompatibleBaseError for a shard that was made
    with something else.
    """
    own_shards = shard_files(folder)[distributed.rank() :: distributed.world()]
    found: dict[Path, _Finding] = {}
    with console.progress("checking hidden states", len(own_shards), unit="shards") as bar:
        for path in own_shards:
            if finding := _look_at(path, requested, differs):
                found[path] = finding
            bar.advance(1)
    found = {path: one for part in distributed.gathered(found) for path, one in part.items()}
    for path, finding in found.items():
        if finding.kind == "damaged":
            _remove_damaged(path, finding.why)
    _refuse_others([(path, one.why) for path, one in found.items() if one.kind == "other"])
    if any(one.kind == "untold" for one in found.values()):
        console.note(
            f"hidden states in {folder} do not say of which base model they are, so that could "
            "not be checked: an earlier version wrote them"
        )


def _look_at(path: Path, requested: Collection[str], differs: Differs) -> _Finding | None:
    """What is to be said of a shard, if anything."""
    try:
        shard = _read_shard(path)
        made_with = dict(parse_json(shard.header.get(MADE_WITH, "{}")))
        other = differs(made_with) if made_with else ""
    except UNREADABLE as error:
        return _Finding("damaged", f"it cannot be read: {error}")
    is_used = any(digest in requested for digest, _ in shard.rows)
    if (is_used or other) and (why := _damage(shard)):
        return _Finding("damaged", why)
    if other:
        return _Finding("other", other)
    return None if made_with or not is_used else _Finding("untold", "")


def _damage(shard: Shard) -> str | None:
    """What its checksum tells against a shard; those of older versions have none."""
    expected = shard.header.get(CRC32)
    if expected is None:
        return None
    actual = _checksum(shard.header, shard.tensors)
    return None if actual == expected else f"its checksum is {actual}, expected {expected}"


def _refuse_others(others: Sequence[tuple[Path, str]]) -> None:
    if others:
        path, why = others[0]
        more = f" (and {len(others) - 1} other files of the folder)" if len(others) > 1 else ""
        raise IncompatibleBaseError(
            f"{path}{more} was made differently: {why} (this run ≠ file)", hint=OTHER_PLACE
        )


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
