"""A file of arrays in the cache folder: made once on this machine, and mapped since.

Its SHA-256 lies beside it, and is compared when the file's times are new and when all is to be
checked. A file that is damaged, or that `read` refuses, is made again in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from medusa_kit import console
from medusa_kit.files import file_digest
from medusa_kit.infer.packed.file import FileSink, NotUsable
from medusa_kit.infer.packed.outdated import remove_outdated, write_record
from medusa_kit.made_once import make_once
from medusa_kit.store.records import content_digest

FILE, DIGEST = "weights.packed", "weights.sha256"
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Origin:
    """What a file is made of: where that lies, and digests of it."""

    place: Path
    contents: Sequence[str]


def kept(
    folder: Path,
    origin: Origin,
    read: Callable[[Path], _Read],
    write: Callable[[FileSink], dict[str, Any]],
    doing: str,
    check: bool = False,
) -> _Read:
    """What `read` makes of the file in `folder`, which may raise NotUsable. `write`: all arrays;
    returns the numbers that belong to them. `check`: the file is read whole, whatever is remembered
    of it. Files made of what lay in the same place before are removed.

    Raises OSError where the file cannot be written, and what `write` raises.
    """
    found: list[_Read] = []
    made: list[Path] = []
    noted: list[str] = []

    def is_whole(there: Path) -> bool:
        found.clear()
        try:
            known = read(there / FILE)
            _check_contents(there, check)
            found.append(known)
        except (NotUsable, OSError) as error:
            if not noted and not isinstance(error, FileNotFoundError):
                console.note(f"{there / FILE} is made again: {error}")
            noted.append(str(error))
        return bool(found)

    def make(temporary: Path) -> None:
        temporary.mkdir()
        with (temporary / FILE).open("wb") as file:
            sink = FileSink(file)
            sink.finish(write(sink))
        (temporary / DIGEST).write_text(file_digest(temporary / FILE))
        write_record(temporary, origin.place, origin.contents)
        made.append(temporary)

    make_once(folder, doing, is_whole, make, told=False)
    if made:
        remove_outdated(folder, origin.place, origin.contents)
    if found or is_whole(folder):
        return found[0]
    raise OSError("it was changed meanwhile")


def _check_contents(folder: Path, whole: bool) -> None:
    """Raises NotUsable for a damaged file. `whole`: it is read, whatever is remembered of it."""
    path = folder / FILE
    expected = (folder / DIGEST).read_text()
    if (file_digest(path) if whole else content_digest(path)) != expected:
        raise NotUsable("its contents are damaged")
