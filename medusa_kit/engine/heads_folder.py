"""Heads that requests may name: subfolders of one folder, and an allow-list on the Hub.

Names come from anywhere, so they are taken for one path component, and nothing is read through a
link that leads out of the folder.
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from medusa_kit.base.hub_client import HubName
from medusa_kit.errors import (
    CheckpointError,
    ConfigError,
    UnknownModelError,
    did_you_mean,
    unreadable,
)
from medusa_kit.heads.checkpoint import PAIRED_FOLDER
from medusa_kit.heads.derived import TREE_NAME
from medusa_kit.heads.formats.files import CONFIG_NAME, local_heads_folder
from medusa_kit.paths import whole
from medusa_kit.shown import shown
from medusa_kit.store.beside import found_beside

MAX_JSON = 16 << 20  # bytes of a file that is read whole as text
Version = tuple[tuple[str, int, int, int], ...]  # name, size, time and inode of each file


@dataclass(frozen=True)
class HeadsLocation:
    """Where heads are. `version` changes with the folder's files; those of the Hub are loaded
    once."""

    name: str
    folder: Path | None = None  # None: on the Hub
    version: Version = ()

    def fetched(self) -> Path:
        """Their folder; heads on the Hub are downloaded if need be. Raises HubError."""
        return local_heads_folder(self.name) if self.folder is None else self.folder


class HeadsFolder:
    """`root`: the folder whose subfolders hold heads; None: there are those of the Hub alone."""

    def __init__(self, root: str | Path | None, hub_ids: Collection[str] = ()) -> None:
        self.root = None if root is None else whole(root)
        self.hub_ids = tuple(hub_ids)
        for hub_id in self.hub_ids:
            HubName.parse(hub_id)
        if self.root is not None and not self.root.is_dir():
            raise ConfigError(
                f"the folder of heads {str(root)!r} does not exist",
                hint="its subfolders hold the heads that requests may name",
            )

    def names(self) -> list[str]:
        """The names of all heads that may be requested, those of the Hub last."""
        names = []
        with os.scandir(self.root) if self.root is not None else _NoEntries() as entries:
            for entry in entries:
                folder = self._subfolder(entry.name)
                if folder is not None and _holds_heads(folder):
                    names.append(entry.name)
        return [*sorted(names), *self.hub_ids]

    def find(self, name: str) -> HeadsLocation:
        """Raises UnknownModelError for what does not exist, CheckpointError for what may not be
        loaded."""
        if name in self.hub_ids:
            return HeadsLocation(name)
        folder = self._subfolder(name)
        if folder is None:
            raise self._unknown(name)
        try:
            version = (*self._version(name, folder), *_found_elsewhere(folder))
            return HeadsLocation(name, folder, version)
        except FileNotFoundError:  # deleted meanwhile
            raise self._unknown(name) from None
        except (OSError, RuntimeError) as error:
            raise unreadable(error)(
                f"heads {name!r} cannot be read: {error}", hint="check who may read their folder"
            ) from error

    def _subfolder(self, name: str) -> Path | None:
        """The subfolder of this name, if there is one inside the root."""
        if self.root is None or name.startswith(".") or not name.isprintable():
            return None
        if not name or {"/", "\\", os.sep} & set(name) or Path(name).name != name:
            return None
        try:
            folder = (self.root / name).resolve(strict=True)
            inside = folder.parent == self.root.resolve(strict=True)
            return folder if inside and folder.is_dir() else None
        except (OSError, ValueError, RuntimeError):  # too long, not to be encoded, a circle
            return None

    def _version(self, name: str, folder: Path) -> Version:
        files = []
        for path in sorted(folder.iterdir()):
            if path.is_symlink() and folder not in path.resolve().parents:
                raise CheckpointError(
                    f"heads {name!r}: {path.name} is a link that leads out of their folder",
                    hint="copy the file there",
                )
            stat = path.stat()
            _check_file(name, path.name, stat)
            files.append((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
            if path.name == PAIRED_FOLDER and path.is_dir():  # of Medusa-2's adapter
                files += self._version(name, path)
        return tuple(files)

    def _unknown(self, name: str) -> UnknownModelError:
        known = self.names()
        return UnknownModelError(
            f"there are no heads {shown(name)} here",
            hint=did_you_mean(name, known, "GET /v1/models lists those there are"),
        )


def _found_elsewhere(folder: Path) -> Version:
    """The tree of heads in a folder that nothing is written to, which lies in the cache folder."""
    tree = found_beside(folder, TREE_NAME)
    if tree.parent == folder:
        return ()
    stat = tree.stat()
    return ((str(tree), stat.st_size, stat.st_mtime_ns, stat.st_ino),)


def _check_file(name: str, file: str, stat: os.stat_result) -> None:
    """Raises CheckpointError for what could be read for ever."""
    if not (S_ISREG(stat.st_mode) or S_ISDIR(stat.st_mode)):
        raise CheckpointError(
            f"heads {name!r}: {file} is no regular file", hint="put a file in its place"
        )
    if file.endswith(".json") and stat.st_size > MAX_JSON:
        raise CheckpointError(
            f"heads {name!r}: {file} has {stat.st_size} bytes; expected {MAX_JSON} at most",
            hint="heads are described in some thousand bytes",
        )


def _holds_heads(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file() or any(folder.glob("*.safetensors"))


class _NoEntries:
    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(())

    def __exit__(self, *_: object) -> None:
        pass
