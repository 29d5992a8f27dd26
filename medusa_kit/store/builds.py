"""Files and folders that take a while to make: one process or thread makes one, and others that
want it at the same time wait for it.

The lock is the operating system's and ends with its owner: a killed process holds nobody up. It
saves work; what keeps readers safe is that things are made under another name. A file lies in a
folder of its own with its SHA-256, and with a record of what it was made of, where such things are
removed once that has changed: no load from there opens the old file again. Processes of this
machine that have mapped it keep it until they end. Files without a record stay.

What depends on a version, such as transformers', has it in its name, so that two environments that
share a cache folder keep their own side by side. Where both are the same bytes, they are one file
with two names.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from filelock import FileLock, Timeout

from medusa_kit import console
from medusa_kit.files import atomic_write, file_digest, parse_json, remove_folder
from medusa_kit.store.records import content_digest, mark_used, place_of

PATIENCE = 1800.0  # seconds until a waiter goes on alone: the owner may be stopped, or hang
ORIGIN = "made_from.json"
FILES = "files"  # in it: the SHA-256 of each file beside it
_Value = TypeVar("_Value")


class NotUsable(Exception):
    """A file that is damaged, cut off, of another version or no such file."""


class Origin(NamedTuple):
    """What a file is made of: the path of its source, and digests of that."""

    path: Path
    contents: Sequence[str]


def make_once(
    folder: Path,
    doing: str,
    is_whole: Callable[[Path], bool],
    make: Callable[[Path], None],
    announce: bool = True,
) -> None:
    """Have `folder` made by `make`, which is given a temporary name, unless it is whole already.

    `announce`: the work is announced here; else `make` does that, once it can be done.
    A folder that is whole is never replaced: another process may be reading it.
    """
    if is_whole(folder):
        return
    with _lock(folder.with_name(f".{folder.name}.lock"), doing) as locked:
        if is_whole(folder):
            return
        if locked:  # so whoever made these was killed
            for ending in ("tmp", "old"):
                for leftover in folder.parent.glob(f".{folder.name}.*.{ending}"):
                    shutil.rmtree(leftover, ignore_errors=True)
        if announce:
            announce_work(doing, folder)
        try:
            with atomic_write(folder) as temporary:
                make(temporary)
                if is_whole(folder):  # by one without a lock; of two renames at once one fails too
                    shutil.rmtree(temporary)
        except OSError:
            if not is_whole(folder):
                raise


def make_file_once(
    path: Path,
    digest: str,
    doing: str,
    make: Callable[[Path], None],
    opened: Callable[[Path], _Value],
    origin: Origin | None = None,
    check: bool = True,
    announce: bool = True,
) -> _Value:
    """Return what `opened` makes of a file in a folder of its own. The file is made again where it
    does not have its SHA-256, which lies beside it as `digest`, or `opened` raises NotUsable or
    OSError.

    `check`: the file is read whole, whatever is remembered of it. `announce`: as `make_once`. Files
    beside this one that were made of other contents of the same `origin` are removed.

    Raises OSError where it cannot be written or be opened when it is new, and what `make` raises.
    """
    values, errors = list[_Value](), list[Exception]()
    made = list[str]()  # the digest of what was made here, which need not be read once more

    def is_whole(folder: Path, known: str | None = None) -> bool:
        values.clear()
        try:
            known = known or (file_digest(path) if check else content_digest(path, own=True))
            if (folder / digest).read_bytes() != known.encode():
                raise NotUsable("its contents are damaged")
            values.append(opened(path))
            mark_used(folder)
        except (NotUsable, OSError) as error:
            _remember(error, errors, path)
        return bool(values)

    def make_whole(temporary: Path) -> None:
        temporary.mkdir()
        new = temporary / path.name
        make(new)
        (temporary / digest).write_text(known := file_digest(new))
        made.append(known)
        _link_same(new, path.parent.parent.glob(f"[!.]*/{path.name}"), digest, known)
        if origin is not None:
            (temporary / ORIGIN).write_text(json.dumps(_origin_record(origin)), encoding="utf-8")

    make_once(path.parent, doing, is_whole, make_whole, announce)
    if origin is not None and errors:
        _remove_outdated(path.parent, origin)
    if values or is_whole(path.parent, *made) or is_whole(path.parent):
        return values[0]
    raise OSError(str(errors[-1]))


def make_folder_once(
    folder: Path, doing: str, make: Callable[[Path], None], origin: Origin
) -> None:
    """Have `folder` made by `make`, which is given a temporary name, unless it is there with all of
    its files, each with the SHA-256 that it was made with. Folders beside it that were made of
    other contents of the same `origin` are removed.

    Raises OSError where it cannot be written, and what `make` raises.
    """
    errors = list[Exception]()

    def is_whole(folder: Path) -> bool:
        try:
            check_files(folder)
        except (NotUsable, OSError) as error:
            _remember(error, errors, folder)
            return False
        mark_used(folder)
        return True

    def make_whole(temporary: Path) -> None:
        make(temporary)
        files = {path.name: file_digest(path) for path in temporary.iterdir()}
        record = json.dumps({**_origin_record(origin), FILES: files})
        (temporary / ORIGIN).write_text(record, encoding="utf-8")

    make_once(folder, doing, is_whole, make_whole)
    if errors:
        _remove_outdated(folder, origin)


def check_files(folder: Path, ending: str = "") -> list[Path]:
    """The files of a folder that `make_folder_once` made, those with this ending. Raises NotUsable
    where one of them is damaged, missing or not of it, OSError."""
    try:
        record = parse_json((folder / ORIGIN).read_bytes())[FILES]
        listed = {str(name): digest for name, digest in record.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotUsable(f"{ORIGIN} does not say what its files are") from error
    found = {path.name for path in folder.iterdir()} - {ORIGIN}
    if differing := sorted(name for name in found ^ listed.keys() if name.endswith(ending)):
        raise NotUsable(f"{differing[0]} is {'missing' if differing[0] in listed else 'not of it'}")
    paths = [folder / name for name in listed if name.endswith(ending)]
    for path in paths:
        if content_digest(path) != listed[path.name]:
            raise NotUsable(f"{path.name} is damaged")
    return paths


def announce_work(doing: str, folder: Path) -> None:
    """Tell the user what is made now and takes a while, and where."""
    console.note(doing)
    console.detail(f"into {folder}")
    console.stage(doing)


@contextlib.contextmanager
def _lock(path: Path, doing: str) -> Iterator[bool]:
    """Lock the file `path` for the context. Yields whether it is locked, which it is not where
    there are no locks or the owner outlasts PATIENCE. `doing`: what the owner does, for the note to
    those who wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            console.note(f"waiting for another process: {doing}")
            lock.acquire(timeout=PATIENCE)
    except Timeout:
        console.warn(f"{path} has been held for {PATIENCE:.0f} seconds; continuing without it")
    except (OSError, NotImplementedError) as error:
        console.note(f"{path} cannot be locked ({error}): work may be done twice")
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _remember(error: Exception, errors: list[Exception], path: Path) -> None:
    """The first reason why a thing is made again is told, unless it is not there at all."""
    if not errors and not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        console.note(f"{path} is made again: {error}")
    errors.append(error)


def _link_same(made: Path, others: Iterable[Path], digest: str, known: str) -> None:
    """Let `made` be another name of one of the others that has the same bytes, if there is one and
    the file system has links."""
    for other in others:
        with contextlib.suppress(OSError):
            if other.with_name(digest).read_bytes() == known.encode() and (
                file_digest(other) == known
            ):
                os.link(other, linked := made.with_name(f"{made.name}.linked"))
                linked.replace(made)
                return


def _origin_record(origin: Origin) -> dict[str, Any]:
    return {"place": place_of(origin.path.resolve()), "contents": list(origin.contents)}


def _remove_outdated(folder: Path, origin: Origin) -> None:
    """Remove folders beside `folder` that were made of other contents of the same origin."""
    expected = _origin_record(origin)
    for path in folder.parent.glob(f"[!.]*/{ORIGIN}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = parse_json(path.read_bytes())
            known = record["contents"]  # earlier versions wrote fewer of them
            other = known != expected["contents"][: len(known)]
            if record["place"] == expected["place"] and other:
                remove_folder(path.parent)
                console.note(f"removed {path.parent}: {origin.path.name} has other contents by now")
