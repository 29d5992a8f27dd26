"""What ties the rows of a file of answers to the settings in the .meta.json beside it.

A row that `data generate` writes says in "origin", by short digests, with what it was made, and in
ROW of all that it says. So rows of another file under these settings are told by their numbers, and
so are rows that were edited or added. How prompts were encoded is not among it: their tokens are.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from medusa_kit.base.fingerprint import Fingerprint
from medusa_kit.base.origin import BASE, BASE_DTYPE, CONFIG, WORDS
from medusa_kit.base.tokenizer.encoding_digest import ENCODING
from medusa_kit.data.sources import read_items
from medusa_kit.data.text_files import COMPRESSED, TABLES
from medusa_kit.errors import DataError
from medusa_kit.files import parse_json

ORIGIN, ROW = "origin", "row"
SETTINGS = "settings"  # all others together
FORM, VERSION = "row_origins", 1  # in the settings: rows have them
LENGTH = 12  # of a digest
SHOWN = 6  # stretches of rows in a message


@dataclass
class Rows:
    """Numbers of a file's rows, from 1, by what they say against the settings."""

    other: list[int] = field(default_factory=list)  # made with something else
    named: list[str] = field(default_factory=list)  # what that is
    edited: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)  # which do not say it, where rows do
    num_earlier: int = 0  # which do not say it, in a file of an earlier version

    @property
    def doubtful(self) -> list[int]:
        """Those that no run with these settings wrote as they are."""
        return sorted([*self.other, *self.edited, *self.silent])

    def in_words(self) -> str:
        words = {name: WORDS.get(name, ("other settings",))[0] for name in self.named}
        kinds = {
            f"made with {' and '.join(words.values())}": self.other,
            "edited since": self.edited,
            "not saying what made them": self.silent,
        }
        return ", ".join(f"{_listed(rows)} ({what})" for what, rows in kinds.items() if rows)


def parts_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Short digests of what rows are made with, by name."""
    apart = (BASE, CONFIG, BASE_DTYPE)
    named = {name: settings[name] for name in apart if name in settings}
    if BASE in named:
        base = Fingerprint.parse(str(named[BASE]))
        named[BASE] = base.of_weights
        if base.whole is None:
            del named[BASE]  # of version 1, another one for the same base
    named[SETTINGS] = {
        name: value for name, value in settings.items() if name not in (*apart, ENCODING, FORM)
    }
    return {name: _digest(value) for name, value in named.items()}


def with_origin(row: Mapping[str, Any], parts: Mapping[str, str]) -> dict[str, Any]:
    """The row, saying that it was made with these `parts_of` the settings."""
    said = {**row, ORIGIN: dict(parts)}
    return {**row, ORIGIN: {**parts, ROW: _digest(said)}}


def check_rows(path: Path, settings: Mapping[str, Any]) -> Rows:
    """What the rows of a file say against the settings. A line that cannot be read is left to
    whoever reads the rows, and so is a last one that was cut off. Raises DataError."""
    found, parts, named = Rows(), parts_of(settings), set[str]()
    for number, row in _rows(path):
        origin = row.get(ORIGIN) if isinstance(row, dict) else None
        if not isinstance(origin, dict) or ROW not in origin:
            if FORM in settings:
                found.silent.append(number)
            else:
                found.num_earlier += 1
            continue
        said = {name: digest for name, digest in origin.items() if name != ROW}
        if with_origin(row, said)[ORIGIN] != origin:
            found.edited.append(number)
        elif other := {name for name in said.keys() & parts if said[name] != parts[name]}:
            found.other.append(number)
            named |= other
    found.named = sorted(named)
    return found


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix in (*COMPRESSED, *TABLES) or raw.lstrip().startswith(b"["):
        yield from read_items(str(path))
        return
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        with contextlib.suppress(ValueError):
            yield number, parse_json(line)


def _digest(value: Any) -> str:
    """As JSON has it, so that it is the same before it is written and after it is read."""
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def _listed(rows: Sequence[int]) -> str:
    """Such as "row 3", or "rows 3, 7 to 9"."""
    ends = [0, *(i for i, (a, b) in enumerate(pairwise(rows), start=1) if b != a + 1), len(rows)]
    stretches = [(rows[start], rows[end - 1]) for start, end in pairwise(ends)]
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in stretches[:SHOWN]]
    shown = sum(b - a + 1 for a, b in stretches[:SHOWN])
    more = f" and {len(rows) - shown} more" if shown < len(rows) else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(parts)}{more}"
