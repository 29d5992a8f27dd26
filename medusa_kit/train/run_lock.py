"""One training at a time in a folder: a lock of the operating system, which dies with its owner."""

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from medusa_kit.errors import ConfigError
from medusa_kit.files import atomic_write, link_target

LOCK = ".training.lock"  # empty; it stays, since removing it would let two in
HOLDER = ".training.json"  # who trains here: a locked file cannot be read everywhere


@contextlib.contextmanager
def only_training_in(folder: Path) -> Iterator[None]:
    """Raises ConfigError, naming who trains there, when somebody does; OSError as mkdir does.

    A folder that was made for the lock and in which nothing else was written is removed again.
    """
    folder = link_target(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"{folder} is in use by another training{_holder(folder)}",
            hint="wait for its end or stop it, or choose another output_dir",
        ) from error
    try:
        with atomic_write(folder / HOLDER) as temporary:
            temporary.write_text(json.dumps(_here()))
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        unused = made and [path.name for path in folder.iterdir()] == [LOCK]
        with contextlib.suppress(OSError):  # Windows keeps a file that is open
            if unused:
                (folder / LOCK).unlink()
        lock.release()
        with contextlib.suppress(OSError):  # somebody else has begun
            if unused:
                folder.rmdir()


def _here() -> dict[str, object]:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": now}


def _holder(folder: Path) -> str:
    try:
        there = json.loads((folder / HOLDER).read_text())
        return f": process {there['pid']} on {there['host']}, since {there['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just begun
        return ""
