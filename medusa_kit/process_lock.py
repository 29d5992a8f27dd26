"""What one process works on at a time: a second one is refused and told who is at it.

The lock is the operating system's and dies with its owner.
"""

import contextlib
import datetime
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from medusa_kit import console
from medusa_kit.errors import ConfigError
from medusa_kit.files import parse_json, write_json

PATIENCE = 1.0  # seconds: a killed process holds its lock until the system has put it away
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def process_lock(
    lock_path: Path, holder: Path, refusal: Callable[[str], ConfigError], unused: Callable[[], bool]
) -> Iterator[None]:
    """Hold the lock file; `holder` names us meanwhile: a locked file cannot be read everywhere.

    Raises what `refusal` makes of the words on who is there, OSError where nothing can be written.
    The lock file stays, since removing it may let two in, unless nothing came of the work
    (`unused`).
    """
    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout as error:
        raise refusal(_there(holder)) from error
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        console.note(f"{lock_path} cannot be locked ({error}): nothing keeps a second process out")
    try:
        write_json(holder, _here())
        yield
    finally:
        holder.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # Windows keeps a file that is open
            if unused():
                lock_path.unlink()
        lock.release()


def _here() -> dict[str, object]:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": now}


def _there(holder: Path) -> str:
    try:
        there = parse_json(holder.read_text())
        return f": process {there['pid']} on {there['host']}, since {there['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just begun
        return ""
