"""Removes what the kit keeps: each folder whole or not at all, while other processes work.

A process that has opened a build has it mapped, and keeps it until it ends. One that wants it next
makes it again. What is being made just now is left to its maker.
"""

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from medusa_kit import console
from medusa_kit.files import remove_folder
from medusa_kit.store.kept import Kept, left_behind

ABANDONED = 24 * 3600.0  # seconds after which nobody writes to a file of a temporary name


def clear(items: Iterable[Kept]) -> tuple[list[Path], list[Path]]:
    """Remove these; returns (what was removed, what could not be, of which a warning tells)."""
    removed, left = list[Path](), list[Path]()
    for path in (path for item in items for path in item.paths):
        try:
            with _locked(path) as free:
                if free and path.is_dir():
                    remove_folder(path)
                elif free:
                    path.unlink()
            if not free:
                console.note(f"{path} stays: another process is making it")
            (removed if free else left).append(path)
        except FileNotFoundError:  # by another process
            pass
        except OSError as error:
            console.warn(f"{path} cannot be removed: {error}")
            left.append(path)
    return removed, left


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether nobody makes this build. Records have no lock: they are written in an instant."""
    lock_path = path.with_name(f".{path.name}.lock")
    if not lock_path.exists():
        yield True
        return
    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError):  # no locks here: who makes it makes it anew
        yield True
        return
    try:
        yield True
        lock_path.unlink(missing_ok=True)
    finally:
        lock.release()


def clear_left_behind() -> None:
    """Remove what killed processes have left: nobody holds the lock of it, or it is a day old."""
    found = list(left_behind())
    for build in {build for _, build in found}:
        had_lock = build.with_name(f".{build.name}.lock").exists()
        with _locked(build) as free:
            for path in (path for path, of in found if of == build and free):
                with contextlib.suppress(OSError):
                    if had_lock or path.lstat().st_mtime + ABANDONED < time.time():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
