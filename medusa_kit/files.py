"""Writing files so that a crash, a full disk or Ctrl-C never leaves a half-written one."""

import errno
import glob
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medusa_kit.errors import DID_YOU_MEAN, WriteError, in_one_line, nearest
from medusa_kit.shown import shown

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
PIECE = 1 << 24  # bytes that are read at a time
OLD = ".old"  # how the name of a folder ends that another one takes the place of


def parse_json(text: str | bytes) -> Any:
    """As json.loads. All that Python's parser refuses is a JSONDecodeError: deep nesting too, and
    integers with more digits than Python reads."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        return _with_long_integers_named(text if isinstance(text, str) else text.decode())


def _with_long_integers_named(text: str) -> Any:
    def integer(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:
            reason = f"an integer of {len(digits.lstrip('-')):,} digits, too many to be read"
            raise json.JSONDecodeError(reason, text, text.index(digits)) from None

    return json.loads(text, parse_int=integer)  # slower, so only to tell which integer it is


class GivenTwiceError(ValueError):
    """Of JSON that a person wrote."""


def parse_written_json(text: str) -> Any:
    """As `parse_json`, of what a person wrote. Raises GivenTwiceError for an object that has a key
    twice, of which JSON's parsers keep the last without a word."""

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise GivenTwiceError(f"the key {shown(key)} is given twice")
            found[key] = value
        return found

    parsed = parse_json(text)
    json.loads(text, object_pairs_hook=each_once)
    return parsed


def near_file(path: Path, otherwise: str) -> str:
    """The hint where nothing is at `path`: the nearest name that its folder has."""
    try:
        names = {other.name for other in path.parent.iterdir()} - {path.name}
    except OSError:
        return otherwise
    close = nearest(path.name, names, cutoff=0.8)
    return otherwise if close is None else DID_YOU_MEAN.format(path.parent / close)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def atomic_write(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` on success, remove it on failure.

    Works for a file and for a folder: whatever the body leaves under the temporary name is moved,
    an old folder of that name being replaced, by a folder alone: for a file, IsADirectoryError. A
    symbolic link stays: what it points to is written, the temporary path lying beside that, so that
    nothing moves to another disk. `mode`: of a file, from its first byte on; None: as open() has
    it. OSError for what is neither file nor folder, such as /dev/null, which root would put an
    ordinary file in place of. WriteError, an OSError too, on a full disk, whatever the library that
    writes raises there.
    """
    path = link_target(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "Not an ordinary file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        if mode is not None:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield temporary
        if path.is_dir() and not temporary.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.is_dir():
            _replace_folder(path, temporary)
        else:
            if temporary.is_file():
                temporary.chmod(_ordinary_mode(temporary) if mode is None else mode)
            temporary.replace(path)
    except Exception as error:
        if isinstance(error, WriteError) or not is_full_disk(error):
            raise
        raise WriteError(
            f"cannot write {path}: {why_not_written(error)}",
            hint="make room on its disk and run the same command again",
        ) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def is_full_disk(error: BaseException) -> bool:
    """Whether Python, safetensors or torch raises this where a file cannot be written whole.

    The latter two have kinds of their own; torch's writer only says where in the file it stopped.
    """
    if isinstance(error, OSError):
        return isinstance(error, WriteError) or error.errno in FULL
    if type(error).__name__ == "SafetensorError":  # not imported: --help comes by here
        return "I/O error" in str(error)
    writer = ("inline_container", "PytorchStreamWriter")
    return isinstance(error, RuntimeError) and any(name in str(error) for name in writer)


def why_not_written(error: BaseException) -> str:
    """What such an error says, with the likely reason where torch's writer does not tell it."""
    said = in_one_line(error)
    if isinstance(error, OSError) or "I/O error" in said or not is_full_disk(error):
        return said
    return f"the file ends early, as on a full disk ({said})"


def link_target(path: Path) -> Path:
    """Where writing to `path` ends up: the path itself, or what a symbolic link there points to.

    A path with `..` is told without it: `a/../a` is nowhere while `a` is being replaced. Raises
    OSError for links that point to each other in a circle.
    """
    path = Path(path)
    try:
        return path.resolve() if path.is_symlink() or ".." in path.parts else path
    except RuntimeError as error:  # Python before 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def remove_folder(folder: Path) -> None:
    """All of it or nothing: where it cannot be renamed, which some systems refuse while its files
    are in use, it stays. Raises OSError."""
    shutil.rmtree(_set_aside(folder), ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    """Rename it, so that nobody finds a part of it; returns the new name."""
    old = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}{OLD}"
    folder.replace(old)
    return old


def _replace_folder(path: Path, temporary: Path) -> None:
    """The old folder comes back where the new one cannot take its place."""
    old = path.replace(temporary.with_suffix(OLD))
    try:
        temporary.replace(path)
    except BaseException:
        old.replace(path)
        raise
    shutil.rmtree(old)


def finish_replacing(path: Path) -> None:
    """Put a new folder in its place, where a process was killed that had made room for it. Nobody
    may be writing to `path`."""
    path = link_target(path)
    for old in path.parent.glob(f".{glob.escape(path.name)}.????????{OLD}"):
        new = old.with_suffix(".tmp")
        if new.is_dir() and not path.exists():
            new.replace(path)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, as the Hub names large files by it."""
    digest = hashlib.sha256()
    with Path(path).open("rb", buffering=0) as file:
        # Large pieces: in a thread, each of them waits for Python.
        piece = memoryview(bytearray(min(PIECE, max(1 << 12, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def mode_of_copy(path: Path) -> int:
    """The mode of a copy that as many may read, and its owner may write."""
    return stat.S_IMODE(path.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR


def _ordinary_mode(beside: Path) -> int:
    """The mode of a file that open() creates; safetensors leaves its files to their owner alone.

    A file is made to see it: os.umask tells the mask only by changing it, for every thread.
    """
    probe = beside.with_name(f"{beside.name}.mode")
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        probe.unlink()
