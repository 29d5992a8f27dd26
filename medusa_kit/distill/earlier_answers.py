"""Answers that were made when text was tokenized differently, or to prompts of another run, in
FILE.earlier, FILE.earlier-2, ...

Each has its settings beside it, as FILE has. An answer is what the model said to the tokens that it
read, so it serves a prompt that has the same tokens now; the rest stays there, unread.
"""

import glob
import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from medusa_kit.data.answer_settings import settings_path, write_settings
from medusa_kit.files import atomic_write

EARLIER = ".earlier"
NEEDED = ("prompt_ids", "id", "response_ids", "finish_reason")
Record = dict[str, Any]


class Prompt(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def asked(self) -> str: ...

    @property
    def prompt_ids(self) -> list[int]: ...


def earlier_files(file: Path) -> list[Path]:
    """The files of earlier answers beside `file`, without their settings."""
    paths = sorted(file.parent.glob(f"{glob.escape(file.name)}{EARLIER}*"))
    return [path for path in paths if not path.name.endswith(".meta.json")]


def set_aside(file: Path, settings: dict[str, Any]) -> Path:
    """Rename `file` to the first of these names that is free, with its settings beside it."""
    path = _free_name(file)
    write_settings(path, settings)
    file.replace(path)
    settings_path(file).unlink(missing_ok=True)
    return path


def put_aside(file: Path, lines: Sequence[bytes], settings: dict[str, Any]) -> Path:
    """Write some of the file's lines under such a name, with their settings."""
    path = _free_name(file)
    write_settings(path, settings)
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def _free_name(file: Path) -> Path:
    names = itertools.chain([EARLIER], (f"{EARLIER}-{number}" for number in itertools.count(2)))
    paths = (file.with_name(file.name + name) for name in names)
    return next(path for path in paths if not path.exists())


class EarlierAnswers:
    """Rows that serve prompts by their tokens, each one prompt."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, ...], list[Record]] = {}

    @property
    def all_used(self) -> bool:
        return not any(self._rows.values())

    def add(self, record: Record) -> None:
        """Raises KeyError for a row without one of NEEDED."""
        prompt_ids, *_ = (record[name] for name in NEEDED)
        self._rows.setdefault(tuple(prompt_ids), []).append(record)

    def has(self, record: Record) -> bool:
        """Whether the same answer to the same tokens is among them."""
        rows = self._rows.get(tuple(record["prompt_ids"]), [])
        return any(row["response_ids"] == record["response_ids"] for row in rows)

    def pick(
        self, prompts: Sequence[Prompt], stop_ids: Collection[int] | None
    ) -> Iterator[tuple[Prompt, Record]]:
        """(prompt, its answer), where there is one: that with the prompt's id, or else any.
        `stop_ids`: the tokens that end an answer now, where they are known."""
        for prompt in prompts:
            rows = self._rows.get(tuple(prompt.prompt_ids), [])
            rows.sort(key=lambda row: str(row["id"]) != prompt.id)
            if rows and (stop_ids is None or _ends_right(rows[0], stop_ids)):
                yield prompt, rows.pop(0)


def _ends_right(row: Record, stop_ids: Collection[int]) -> bool:
    """Whether the answer would end where it did."""
    *before, last = row["response_ids"] or [None]
    stopped = row["finish_reason"] == "stop"
    return (last in stop_ids) == stopped and not any(token in stop_ids for token in before)
