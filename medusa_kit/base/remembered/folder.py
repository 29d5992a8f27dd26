"""The cache folder ($MEDUSA_KIT_CACHE, $XDG_CACHE_HOME/medusa-kit or ~/.cache/medusa-kit), and
the digests of files that it remembers.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from medusa_kit.files import atomic_write, file_digest, parse_json

SETTLED_SECONDS = 2  # no file system's clock is coarser


def cache_folder() -> Path:
    if own := os.environ.get("MEDUSA_KIT_CACHE"):
        return Path(own).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "medusa-kit"


def content_digest(path: Path) -> str:
    """SHA-256 of the whole file: a fine-tune may have the same name, size and beginning.

    Digests are remembered by the file's path, size and times, so that later starts need not read
    it. Times are coarse, so a file that was written just now may change without a new time.
    """
    path = path.resolve()
    stamp = _stamp(path)
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    memory = cache_folder() / "digests" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
        known = parse_json(memory.read_text())
        if known.items() >= stamp.items():
            return str(known["sha256"])
    digest, now = file_digest(path), time.time_ns()
    if _is_settled(stamp, now) and _stamp(path) == stamp:
        with contextlib.suppress(OSError), atomic_write(memory) as temporary:
            temporary.write_text(json.dumps({**stamp, "sha256": digest}) + "\n")
    return digest


def settled_stamp(path: Path) -> tuple[Any, ...] | None:
    """What changes with a file's contents; None for one that was written just now. Raises
    OSError."""
    stamp = _stamp(path.resolve())
    return tuple(stamp.values()) if _is_settled(stamp, time.time_ns()) else None


def _is_settled(stamp: dict[str, Any], now: int) -> bool:
    newest = max(stamp["mtime_ns"], stamp["ctime_ns"])
    return bool(newest + SETTLED_SECONDS * 10**9 < now)


def _stamp(path: Path) -> dict[str, Any]:
    """Path, size and times, which change with a file's contents."""
    stamp = path.stat()
    return {
        "path": str(path),
        "size": stamp.st_size,
        "mtime_ns": stamp.st_mtime_ns,
        "ctime_ns": stamp.st_ctime_ns,
    }
