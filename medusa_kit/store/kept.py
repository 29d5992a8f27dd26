"""What lies in the cache folder, as `medusa-kit cache` shows it.

Only what the kit made is found: by its place, its name and the names of the files in it. Whatever
else is there, a folder that has a file too many, or a link, is left alone.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_kit.files import parse_json
from medusa_kit.store.beside import FOUND, GATHERED
from medusa_kit.store.builds import ORIGIN
from medusa_kit.store.records import ABOUT, cache_folder, extensions_folder, place_of, read_record

MODELS, GGUF, PACKED, KERNELS, RECORDS = "models", "gguf", "packed", "kernels", "records"
KINDS: Mapping[str, str] = {
    MODELS: "models that `make model` brought",
    FOUND: "trees and statistics, found for heads where nothing can be written",
    GGUF: "GGUF files as transformers reads them",
    PACKED: "weights of models and heads, packed for C++",
    KERNELS: "the C++ kernels, compiled",
    RECORDS: "digests, descriptions, checks that passed, step times",
}
RECORD_FOLDERS = ("digests", "described", "checks", "step_times")
RECORD = re.compile(r"[0-9a-f]{16}(-config|-tokenizer-parts)?\.json")
BY_CONTENTS = re.compile(r".+-[0-9a-f]{16}", re.DOTALL)
GGUF_FOLDER = re.compile(
    r".+-[0-9a-f]{16}(-scales|(-t\d+(-[0-9a-f]{8})?)?(-described)?)", re.DOTALL
)
KERNELS_FOLDER = re.compile(r"medusa_kit_[0-9a-f]{12}")
PACKED_FILES = re.compile(r"weights\.(packed|sha256)|made_from\.json")
KERNELS_FILES = re.compile(r"medusa_kit_.*\.so|sha256|build\.ninja|\.ninja_.*|.*\.o|lock")
MODEL_FILES = re.compile(r".*\.gguf|LICEN[CS]E.*|NOTICE.*|README.*")
FOUND_FILES = re.compile(
    r"tree\.(json|png)|statistics\.npz|calibration_answers\.jsonl.*|made_from\.json|\.calibration"
    r"|\.(.+\.)?[0-9a-f]{8}\.tmp"
)
# Folders in it, of a search that goes on or was killed while it wrote its results.
UNFINISHED = re.compile(rf"{re.escape(GATHERED)}|\.[0-9a-f]{{8}}\.tmp")
GGUF_FILES = re.compile(
    r"made_from\.json|sha256|.*config\.json|.*\.safetensors|.*\.index\.json|.*\.cache|.*\.jinja"
    r"|tokenizer\.(json|model)|vocab\.(json|txt)|merges\.txt|.*_(tokens|tokens_map)\.json"
)
TEMPORARY = re.compile(r"\.(.+)\.(?:[0-9a-f]{8}\.(?:tmp|old)|lock|part)", re.DOTALL)
MACHINE, PLACE = 0, 1  # of a place
Area = tuple[str, Path, re.Pattern[str], re.Pattern[str]]  # kind, folder, names, files inside


@dataclass
class Kept:
    """Some of what is kept: one folder, or the records of one model. `place`: [machine, path] of
    what it was made of, where that is known."""

    kind: str
    paths: list[Path]
    place: list[str] | None = None
    used: float = 0.0  # seconds since 1970
    files: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes by device and inode

    @property
    def size(self) -> int:
        return sum(self.files.values())

    @property
    def source_exists(self) -> bool | None:
        """None where nobody can tell: on another machine, on the Hub, or not written down."""
        if self.place is None or self.place[MACHINE] != place_of("")[MACHINE]:
            return None
        path = Path(self.place[PLACE])
        return os.path.lexists(path) if path.is_absolute() else None

    def add(self, path: Path) -> None:
        """Count a file or folder in."""
        status = path.lstat()
        self.used = max(self.used, status.st_mtime if path in self.paths else 0.0)
        if stat.S_ISDIR(status.st_mode):
            for inside in path.iterdir():
                self.add(inside)
        else:
            self.files[status.st_dev, status.st_ino] = status.st_size


def everything_kept() -> list[Kept]:
    """All that the kit keeps in the cache folder and among torch's extensions, by kind."""
    found = list[Kept]()
    for kind, folder, name, files in _areas():
        for path in _inside(folder):
            with contextlib.suppress(OSError):
                if name.fullmatch(path.name) and _holds_only(path, files):
                    place = place_of(path) if kind == MODELS else _origin_place(path)
                    found.append(_counted(Kept(kind, [path], place)))
    return [*found, *_records()]


def left_behind() -> Iterator[tuple[Path, Path]]:
    """(what making a build, or writing a record, leaves where its process is killed; the build or
    record). Somebody may be at it just now."""
    names = [(folder, name) for _, folder, name, _ in _areas()]
    for folder, name in (*names, *((cache_folder() / kind, RECORD) for kind in RECORD_FOLDERS)):
        for path in _inside(folder):
            if (match := TEMPORARY.fullmatch(path.name)) and name.fullmatch(match[1]):
                yield path, folder / match[1]


def _areas() -> list[Area]:
    root = cache_folder()
    return [
        (MODELS, root / MODELS, re.compile(r"[^.].*", re.DOTALL), MODEL_FILES),
        (FOUND, root / FOUND, BY_CONTENTS, FOUND_FILES),
        (GGUF, root, GGUF_FOLDER, GGUF_FILES),
        (PACKED, root / PACKED, BY_CONTENTS, PACKED_FILES),
        (KERNELS, extensions_folder(), KERNELS_FOLDER, KERNELS_FILES),
    ]


def _inside(folder: Path) -> Iterator[Path]:
    """What lies in a folder. A link may lead out of the cache folder, so nothing lies in one,
    unless it is what the user named."""
    with contextlib.suppress(OSError):  # one that this user may not see is as good as empty
        if not folder.is_symlink() or folder in (cache_folder(), extensions_folder()):
            yield from sorted(folder.iterdir())


def _holds_only(folder: Path, names: re.Pattern[str]) -> bool:
    """Whether it is a folder with files of these names alone."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    inside = list(folder.iterdir())
    regular = all(stat.S_ISREG(path.lstat().st_mode) or UNFINISHED.fullmatch(path.name)
                  for path in inside)  # fmt: skip
    return bool(inside) and regular and all(names.fullmatch(path.name) for path in inside)


def _records() -> list[Kept]:
    """Those of each model together."""
    by_place: dict[Any, Kept] = {}
    for kind in RECORD_FOLDERS:
        for path in _inside(cache_folder() / kind):
            if RECORD.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
                place = _record_place(path)
                together = by_place.setdefault(place and tuple(place), Kept(RECORDS, [], place))
                together.paths.append(path)
    return [_counted(kept) for kept in by_place.values()]


def _counted(kept: Kept) -> Kept:
    for path in kept.paths:
        with contextlib.suppress(OSError):
            kept.add(path)
    return kept


def _record_place(path: Path) -> list[str] | None:
    with contextlib.suppress(OSError, ValueError):
        return _as_place(read_record(path).get(ABOUT))
    return None


def _origin_place(folder: Path) -> list[str] | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return _as_place(parse_json((folder / ORIGIN).read_bytes()).get("place"))
    return None


def _as_place(value: Any) -> list[str] | None:
    whole = isinstance(value, list) and len(value) == 2
    return value if whole and all(isinstance(part, str) for part in value) else None
