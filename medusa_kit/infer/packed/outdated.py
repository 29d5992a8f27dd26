"""Packed files whose checkpoint has other contents by now are removed.

Beside each lies a record: the place of its checkpoint, with the machine, and digests of what was in
it. Once other contents are packed from that place, no load from there opens the old file again.
Processes of this machine that have mapped it keep it until they end. Files without a record stay.
"""

import contextlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from medusa_kit import console
from medusa_kit.files import parse_json, remove_folder

RECORD = "made_from.json"


def write_record(folder: Path, place: Path, contents: Sequence[str]) -> None:
    """`contents`: digests of the checkpoint's files."""
    record = {"place": _where(place), "contents": list(contents)}
    (folder / RECORD).write_text(json.dumps(record), encoding="utf-8")


def remove_outdated(folder: Path, place: Path, contents: Sequence[str]) -> None:
    """Those beside `folder` that were made of other contents from the same place."""
    where = _where(place)
    for path in folder.parent.glob(f"[!.]*/{RECORD}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = parse_json(path.read_bytes())
            if record["place"] == where and record["contents"] != list(contents):
                remove_folder(path.parent)
                console.note(f"removed {path.parent}: {place.name} has other contents by now")


def _where(place: Path) -> list[str]:
    """With the machine, since several may share a cache folder and have other models there."""
    return [platform.node(), str(place.resolve())]
