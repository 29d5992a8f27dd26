"""Files that belong together come to be in their folder together or not at all, even where the
process is killed.

They gather in a hidden folder. Its new name says that it is whole; from then on they count as
written, and whoever writes there next moves what a killed process has not.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from medusa_kit.errors import WriteError
from medusa_kit.files import atomic_write, link_target

WHOLE = ".whole"


@contextmanager
def moved_together(folder: Path, replaced: Collection[str] = ()) -> Iterator[Path]:
    """Yield a new folder. On success all files in it are moved into `folder`, which is made if
    missing; on failure none is. Files named in `replaced` go where there is no new one."""
    folder = link_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    finish_moves(folder)
    staging = folder / f".{uuid.uuid4().hex[:8]}.tmp"
    staging.mkdir()
    try:
        yield staging
        names = {path.name for path in staging.iterdir()}
        _check_files(folder, names)
        for name in {*replaced} - names:
            (folder / name).unlink(missing_ok=True)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, WriteError):  # the hidden folder is nobody's concern
            message = error.message.replace(str(staging), str(folder))
            raise WriteError(message, hint=error.hint) from error
        raise
    whole = staging.replace(staging.with_suffix(WHOLE))
    try:
        _move_all(whole)
    except Exception:
        shutil.rmtree(whole, ignore_errors=True)
        raise


def finish_moves(folder: Path) -> None:
    """Move what a process that was killed has left. Another process may be at it right now."""
    for whole in link_target(folder).glob(f".????????{WHOLE}"):
        with suppress(OSError):  # it stays where nothing can be written
            _move_all(whole)


def _check_files(folder: Path, names: Collection[str]) -> None:
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / name))


def _move_all(whole: Path) -> None:
    for path in sorted(whole.iterdir()):
        with suppress(FileNotFoundError):  # another process has moved it
            _move(path, link_target(whole.parent / path.name))
    with suppress(FileNotFoundError):
        whole.rmdir()


def _move(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with atomic_write(target) as temporary:  # a link led to another disk
            shutil.copyfile(path, temporary)
        path.unlink()
