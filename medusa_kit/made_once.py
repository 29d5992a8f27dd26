"""One process or thread makes a thing; others that want it at the same time wait for it.

The lock is the operating system's and ends with its owner: a killed process holds nobody up. It
saves work; what keeps readers safe is that things are made under another name.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from medusa_kit import console
from medusa_kit.files import atomic_write

PATIENCE = 1800.0  # seconds until one goes on alone: the owner may be stopped, or hang


class _MadeMeanwhile(Exception):
    """Somebody else was first."""


@contextlib.contextmanager
def only_one(path: Path, doing: str, patience: float = PATIENCE) -> Iterator[bool]:
    """Hold the lock file `path`; whether it is held, which it is not where there are no locks or
    its owner outlasts `patience`. `doing`: what the owner does, for the note to those who wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    held = False
    try:
        held = _acquired(lock, 0)
        if not held:
            console.note(f"waiting for another process: {doing}")
            held = _acquired(lock, patience)
        if not held:
            console.warn(f"{path} has been held for {patience:.0f} seconds; continuing without it")
    except (OSError, NotImplementedError) as error:
        console.note(f"{path} cannot be locked ({error}): work may be done twice")
    try:
        yield held
    finally:
        if held:
            lock.release()


def make_once(
    folder: Path,
    doing: str,
    is_whole: Callable[[Path], bool],
    make: Callable[[Path], None],
    patience: float = PATIENCE,
    told: bool = True,
) -> None:
    """Have `folder` made by `make`, which is given a temporary name, unless it is whole already.

    `told`: what is done is said here; else `make` says it, once it knows that it can be done.
    A folder that is whole is never replaced: another process may be reading it.
    """
    if is_whole(folder):
        return
    with only_one(folder.with_name(f".{folder.name}.lock"), doing, patience) as held:
        if is_whole(folder):
            return
        if held:  # so whoever made these was killed
            for ending in ("tmp", "old"):
                for left in folder.parent.glob(f".{folder.name}.*.{ending}"):
                    shutil.rmtree(left, ignore_errors=True)
        if told:
            tell(doing, folder)
        try:
            with atomic_write(folder) as temporary:
                make(temporary)
                if is_whole(folder):  # by one without a lock
                    raise _MadeMeanwhile
        except _MadeMeanwhile:
            return
        except OSError:  # of two renames at the same time one fails
            if not is_whole(folder):
                raise


def tell(doing: str, folder: Path) -> None:
    """What is made now and takes a while, and where."""
    console.note(doing)
    console.detail(f"into {folder}")
    console.stage(doing)


def _acquired(lock: FileLock, seconds: float) -> bool:
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return False
    return True
