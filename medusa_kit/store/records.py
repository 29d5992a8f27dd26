"""The cache folder ($MEDUSA_KIT_CACHE, $XDG_CACHE_HOME/medusa-kit or ~/.cache/medusa-kit) and its
records: small JSON files of what earlier runs found out, each with a checksum.
"""

import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.files import atomic_write, file_digest, parse_json
from medusa_kit.locks import KeyedLocks
from medusa_kit.paths import expanded

SETTLED_SECONDS = 2  # no file system's clock is coarser
CHECKSUM, ABOUT = "checksum", "about"  # of a record: of all else in it; what it was found out of

_not_writable: set[Path] = set()  # cache folders of which a warning said so
_told: set[Path] = set()  # records of which a note said that they cannot be used
_digests: dict[tuple[Any, ...], str] = {}  # by stamp, of files that this process has asked for
_reading = KeyedLocks()  # of files whose digests are being made


def cache_folder() -> Path:
    if own := os.environ.get("MEDUSA_KIT_CACHE"):
        return expanded(own)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "medusa-kit"


def extensions_folder() -> Path:
    """Where torch keeps what it compiles: the folder that it lets users choose, or its own. Torch
    is not imported for it."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "torch_extensions"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def short_digest(text: str) -> str:
    """Sixteen digits that stand for a text in the name of a file."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def place_of(source: str | Path) -> list[str]:
    """[machine, place] of what something was made of: a path, or the name of a model that is none.
    Several machines may share a cache folder and have other files there."""
    path = expanded(source)
    return [platform.node(), str(path.absolute() if os.path.lexists(path) else source)]


def mark_used(path: Path) -> None:
    """Let its time say that it was used now, where this process may."""
    with contextlib.suppress(OSError):
        os.utime(path)


class Record:
    """A file of findings, which hold for as long as all that they depend on is the same.

    `name`: the file's. Of several processes that write one, the last stays. A name by all that the
    record depends on lets several lie side by side; else the newest replaces the others. `about`:
    the model that it tells of, for those who ask what is kept.
    """

    def __init__(
        self, kind: str, name: str, depends_on: Mapping[str, Any], about: str | Path | None = None
    ) -> None:
        self.path = cache_folder() / kind / f"{name}.json"
        self._depends_on = json.loads(json.dumps(depends_on))
        self._about = about

    def read(self) -> dict[str, Any] | None:
        """Return all that the file says; None where there is none, or one of something else. One
        that is damaged or cannot be read is told of, once, and taken for none."""
        try:
            record = read_record(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            if self.path not in _told:
                _told.add(self.path)
                console.note(f"{self.path} is made again: {error}")
            return None
        if not record.items() >= self._depends_on.items():
            return None
        mark_used(self.path)
        return record

    def write(self, **findings: Any) -> None:
        """Write the findings. Where that fails, a warning says so once, and the next run finds them
        out again. Raises TypeError for what JSON cannot say."""
        about = {} if self._about is None else {ABOUT: place_of(self._about)}
        record = json.loads(json.dumps({**self._depends_on, **findings, **about}))
        text = json.dumps({**record, CHECKSUM: _checksum(record)})
        try:
            self._make_room()
            with atomic_write(self.path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            if (folder := cache_folder()) not in _not_writable:
                _not_writable.add(folder)
                console.warn(
                    f"{folder} cannot be written, so the next start will find out again what could "
                    f"be kept there: {error}"
                )

    def _make_room(self) -> None:
        """A link goes, through which the record would be written elsewhere, and an empty folder;
        one with anything in it is somebody's. Raises OSError."""
        if self.path.is_symlink():
            self.path.unlink()
        elif self.path.is_dir():
            with contextlib.suppress(OSError):
                self.path.rmdir()


def read_record(path: Path) -> dict[str, Any]:
    """What a record says, without its checksum. Raises OSError, and ValueError for a damaged one.

    One of an earlier version has no checksum: nobody can tell whether it is whole.
    """
    record = parse_json(path.read_bytes())
    if not isinstance(record, dict) or CHECKSUM not in record:
        raise ValueError("it has no checksum: it is damaged, or of an earlier version")
    if record.pop(CHECKSUM) != _checksum(record):
        raise ValueError("its contents are damaged")
    return record


def _checksum(record: Mapping[str, Any]) -> str:
    try:
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def content_digest(path: Path, own: bool = False) -> str:
    """SHA-256 of the whole file: a fine-tune may have the same name, size and beginning.

    Digests are recorded with the file's path, size and times, so that later starts need not read
    it. Times are coarse, so a file that was written just now may change without a new time.
    `own`: the kit wrote it, and may not have waited for the disk. This waits before the digest is
    recorded: after a power cut the record must not stand for contents that were lost.
    """
    about = path if path.suffix == ".gguf" else path.parent  # the model, not one of its files
    path = Path(os.path.realpath(path))  # links in a circle are an OSError where they are read
    with _reading.of(path):  # another thread may have begun
        stamp = _stamp(path)
        if (known := _digests.get(tuple(stamp.values()))) is not None:
            return known
        record = Record("digests", short_digest(str(path)), stamp, about)
        digest = str((record.read() or {}).get("sha256") or _new_digest(path, stamp, record, own))
        if _is_settled(stamp, time.time_ns()):
            _digests[tuple(stamp.values())] = digest
        return digest


def _new_digest(path: Path, stamp: dict[str, Any], record: Record, own: bool) -> str:
    digest, now = file_digest(path), time.time_ns()
    if _is_settled(stamp, now) and _stamp(path) == stamp:
        if own:
            _wait_for_disk(path)
        record.write(sha256=digest)
    return digest


def _wait_for_disk(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("rb") as file:  # Windows needs it to be writable
        os.fsync(file.fileno())


def settled_stamp(path: Path) -> tuple[Any, ...] | None:
    """A tuple that changes with a file's contents; None for one that was written just now. Raises
    OSError."""
    stamp = _stamp(Path(os.path.realpath(path)))
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
