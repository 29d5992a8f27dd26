"""A cache of the libraries compiled here. A library is opened only if it is complete.

A library is stored in a folder of its own with a digest of its bytes. The folder is made under
another name and renamed, so a killed build leaves nothing that is opened. A file that was cut off
or damaged later does not match its digest; opening it could end the process.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

from medusa_kit import console
from medusa_kit.files import file_digest
from medusa_kit.made_once import make_once

SEAL = "sha256"
BUILD_PATIENCE = 600.0  # seconds that another process may compile; a build takes about a minute


def library_in(folder: Path, doing: str, compile_into: Callable[[Path], None]) -> Path:
    """The library in `folder`; if need be `compile_into` makes it in a folder that it is given."""

    def make(temporary: Path) -> None:
        temporary.mkdir()
        compile_into(temporary)
        library = temporary / _library(folder).name
        # torch's loader adds a suffix to the name of a library that it has built before.
        next(temporary.glob("*.so")).rename(library)
        (temporary / SEAL).write_text(file_digest(library))

    make_once(folder, doing, _is_whole, make, BUILD_PATIENCE)
    return _library(folder)


def opened(build: Callable[[], Path]) -> ctypes.CDLL:
    """The library that `build` returns. One that does not open is built once more: it may come from
    a machine with newer system libraries.

    Raises OSError where the new one does not open either, and what `build` raises.
    """
    path = build()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        console.note(f"{path} cannot be opened ({error}), so it is built again")
        (path.parent / SEAL).unlink(missing_ok=True)
        return ctypes.CDLL(str(build()))


def _library(folder: Path) -> Path:
    return folder / f"{folder.name}.so"


def _is_whole(folder: Path) -> bool:
    try:
        return file_digest(_library(folder)) == (folder / SEAL).read_text()
    except (OSError, UnicodeDecodeError):
        return False
