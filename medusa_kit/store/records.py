"""The cache folder ($MEDUSA_KIT_CACHE, $XDG_CACHE_HOME/medusa-kit or ~/.cache/medusa-kit) and its
records: small JSON files of what earlier runs found out.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.files import atomic_write, file_digest, parse_json

SETTLED_SECONDS = 2  # no file system's clock is coarser

_not_writable: set[Path] = set()  # cache folders of which a warning said so


def cache_folder() -> Path:
    if own := os.environ.get("MEDUSA_KIT_CACHE"):
        return Path(own).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "medusa-kit"


def short_digest(text: str) -> str:
    """Sixteen digits that stand for a text in the name of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Record:
    """A file of findings, which hold for as long as all that they depend on is the same.

    `name`: the file's. Of several processes that write one, the last stays. A name by all that the
    record depends on lets several lie side by side; else the newest replaces the others.
    """

    def __init__(self, kind: str, name: str, depends_on: Mapping[str, Any]) -> None:
        self.path = cache_folder() / kind / f"{name}.json"
        self._depends_on = json.loads(json.dumps(depends_on))

    def read(self) -> dict[str, Any] | None:
        """Return all that the file says; None where there is none, or one that is damaged or of
        something else."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            record = parse_json(self.path.read_bytes())
            if record.items() >= self._depends_on.items():
                return dict(record)
        return None

    def write(self, **findings: Any) -> None:
        """Write the findings. Where that fails, a warning says so once, and the next run finds them
        out again. Raises TypeError for what JSON cannot say."""
        text = json.dumps({**self._depends_on, **findings})
        try:
            with atomic_write(self.path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            if (folder := cache_folder()) not in _not_writable:
                _not_writable.add(folder)
                console.warn(
                    f"{folder} cannot be written, so the next start will find out again what could "
                    f"be kept there: {error}"
                )


def content_digest(path: Path) -> str:
    """SHA-256 of the whole file: a fine-tune may have the same name, size and beginning.

    Digests are recorded with the file's path, size and times, so that later starts need not read
    it. Times are coarse, so a file that was written just now may change without a new time.
    """
    path = path.resolve()
    stamp = _stamp(path)
    record = Record("digests", short_digest(str(path)), stamp)
    if "sha256" in (known := record.read() or {}):
        return str(known["sha256"])
    digest, now = file_digest(path), time.time_ns()
    if _is_settled(stamp, now) and _stamp(path) == stamp:
        record.write(sha256=digest)
    return digest


def settled_stamp(path: Path) -> tuple[Any, ...] | None:
    """A tuple that changes with a file's contents; None for one that was written just now. Raises
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
