"""Where a person wants results written: checked before anything is loaded.

What lies there and is not of the kind that the command writes is a person's own, and stays.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.files import parse_json

SOFTWARE = "medusa-kit"  # in pictures
PNG = b"\x89PNG\r\n\x1a\n"
Ours = Callable[[Path], bool]


def check_folder(folder: Path, option: str) -> None:
    """Raises ConfigError where there can be no folder, or none that we may write into. `option`:
    what names it."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{option} {folder} is a file; expected a folder", hint="name another")
    _check_place(folder, folder, option)


def check_file(path: Path, option: str, ours: Ours | None = None) -> None:
    """The same for a file, which may be replaced where `ours` knows it for one of its kind."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; expected a file", hint="name a file in it")
    _check_place(path, path.parent, option)
    if ours is not None:
        check_replaced(path.parent, {path.name: ours}, option)


def check_replaced(folder: Path, files: Mapping[str, Ours], option: str) -> None:
    """Raises ConfigError where `folder` holds a file of one of these names that would be replaced
    and is not of its kind."""
    theirs = [
        name for name, ours in files.items()
        if (folder / name).exists() and not ours(folder / name)
    ]  # fmt: skip
    if theirs:
        raise ConfigError(
            f"{folder} holds {', '.join(theirs)}, which medusa-kit did not write and would replace",
            hint=f"give another place as {option}, or move it away",
        )


def has_keys(*names: str) -> Ours:
    """Tells files that hold a JSON object with these keys."""

    def ours(path: Path) -> bool:
        found = json_object(path)
        return found is not None and all(name in found for name in names)

    return ours


def is_picture(name: str, ours: Ours) -> Ours:
    """Tells pictures that this kit drew: they say so, as all that `SOFTWARE` is written into. Those
    of earlier versions are matplotlib's, beside a file of this name that is `ours`."""

    def drawn(path: Path) -> bool:
        with suppress(OSError), path.open("rb") as file:
            head = file.read(4096)
            if not head.startswith(PNG):
                return False
            told = b"Software\0" + SOFTWARE.encode() in head
            return told or (b"Software\0Matplotlib" in head and ours(path.with_name(name)))
        return False

    return drawn


def json_object(path: Path) -> dict[str, Any] | None:
    """What a file holds that is a JSON object; None for all others."""
    try:
        value = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _check_place(path: Path, folder: Path, option: str) -> None:
    """Whether `folder` is there to write into, or can be made."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise ConfigError(f"{option} {path}: {there} is a file", hint="name another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: {there} cannot be written to", hint="name another")
