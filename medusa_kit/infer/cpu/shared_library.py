"""Libraries that were compiled here, kept for later starts, and never opened unless they are whole.

A library lies in a folder of its own beside a digest of its bytes. The folder is made under another
name and renamed, so that a build that was killed leaves nothing that is ever opened; what was cut
off or damaged later does not match its digest. To open such a file would end the process.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

from medusa_kit import console
from medusa_kit.files import file_digest
from medusa_kit.made_once import make_once

SEAL = "sha256"
BUILD_PATIENCE = 600.0  # seconds that another process may compile; it needs about one minute


def library_in(folder: Path, doing: str, compile_into: Callable[[Path], None]) -> Path:
    """The library in `folder`, compiled if need be by `compile_into`, which is given a folder."""

    def make(temporary: Path) -> None:
        temporary.mkdir()
        compile_into(temporary)
        library = temporary / _library(folder).name
        # Torch's loader appends to the name where it built the same before.
        next(temporary.glob("*.so")).rename(library)
        (temporary / SEAL).write_text(file_digest(library))

    make_once(folder, doing, _is_whole, make, BUILD_PATIENCE)
    return _library(folder)


def opened(build: Callable[[], Path]) -> ctypes.CDLL:
    """The library that `build` returns; where it does not open, it is built once more.

    One that is whole may not open: made on another machine, with newer system libraries.
    Raises OSError where the new one does not open either, and what `build` raises.
    """
    path = build()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        console.note(f"{path} cannot be opened ({error}): building it again")
        (path.parent / SEAL).unlink(missing_ok=True)
        return ctypes.CDLL(str(build()))


def _library(folder: Path) -> Path:
    return folder / f"{folder.name}.so"


def _is_whole(folder: Path) -> bool:
    try:
        return file_digest(_library(folder)) == (folder / SEAL).read_text()
    except (OSError, UnicodeDecodeError):
        return False
