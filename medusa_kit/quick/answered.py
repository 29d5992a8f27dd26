"""`--from FILE`: answers that are there already, as a server records them, in place of prompts.

A server may go on writing, so the run works on a copy of what was there when it began. Which rows
are held out is decided as it is for prompts (prompts.py).
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medusa_kit.base.fingerprint import SAME_MODEL, compare
from medusa_kit.base.model import BaseModel
from medusa_kit.data.answer_settings import (
    base_that_answered,
    read_settings,
    settings_path,
    write_settings,
)
from medusa_kit.data.readers import AnswerRow, BadRow, Row, read_good_and_bad
from medusa_kit.data.text_files import CutOffError
from medusa_kit.equal_rows import conversations, groups_of
from medusa_kit.errors import ConfigError, DataError
from medusa_kit.files import atomic_write, link_target, mode_of_copy, parse_json
from medusa_kit.paths import expanded
from medusa_kit.quick.answers import Written
from medusa_kit.quick.prompts import MIN_PROMPTS, Prompts, divided

MADE_BY = "`medusa-kit serve --record FILE` and `medusa-kit data generate` make such files"


def read_answered(source: Path, name: str, earlier: bool = False) -> Prompts:
    """The rows of a file of answers, divided; `earlier`: as earlier versions did. `name`: that it
    goes by. Raises DataError for a file that holds other rows or too few, ConfigError for one that
    does not say what answered."""
    if not source.is_file():
        raise DataError(f"{name} is no file", hint=MADE_BY)
    if read_settings(source) is None:
        raise ConfigError(
            f"{name} has no {settings_path(source).name} with it, which says which model answered",
            hint=MADE_BY,
        )
    rows, refused = list[AnswerRow](), list[tuple[int, str]]()
    for row in _whole_rows(source):
        if isinstance(row, AnswerRow) and row.response_ids:
            rows.append(row)
        else:
            reason = row.reason if isinstance(row, BadRow) else "it is no answer"
            refused.append((row.row, reason))
    unique = dict[str, AnswerRow]()
    for row in sorted(rows, key=_name):
        unique.setdefault(_name(row), row)
    first = f"row {refused[0][0]}: {refused[0][1]}" if refused else None
    if len(unique) < MIN_PROMPTS:
        raise DataError(
            f"{name} has answers to {len(unique)} different prompts (rows of other kinds: "
            f"{len(refused)}{f', the first is {first}' if first else ''}); at least {MIN_PROMPTS} "
            "are needed, because some are held out",
            hint=f"a few hundred give first heads, ten thousand good ones; {MADE_BY}",
        )
    ordered = list[Row](unique.values())
    names = _conversations([*unique.values()])
    training, calibration, test = divided(name, list(zip(names, ordered, strict=True)), earlier)
    digest = hashlib.sha256(json.dumps(sorted(unique)).encode()).hexdigest()[:16]
    return Prompts(name, training, calibration, test, digest, len(refused), first,
                   len(rows) - len(unique), answered=True, earlier=earlier)  # fmt: skip


def _whole_rows(source: Path) -> Iterator[Row | BadRow]:
    """The rows, without what a server that was stopped wrote of one more."""
    try:
        yield from read_good_and_bad(str(source), extras=True)
    except CutOffError as error:
        yield BadRow("it is cut off, as by a server that was stopped", error.row, str(source))


def keep_copy(source: str, copy: Path) -> None:
    """Copy the whole rows of a file and what is said of them, unless that is done. What only its
    owner can read stays so in every copy."""
    if copy.is_file():
        return
    file = link_target(expanded(source))
    raw, said = file.read_bytes(), read_settings(file)
    assert said is not None, "the file was read before"
    write_settings(copy, said)
    end = raw.rfind(b"\n") + 1
    last = raw[end:]
    with atomic_write(copy, mode_of_copy(file)) as temporary:
        temporary.write_bytes(raw[:end] + (last + b"\n" if _is_whole(last) else b""))


def _is_whole(line: bytes) -> bool:
    try:
        parse_json(line.decode())
    except ValueError:  # of either
        return False
    return True


def check_base(base: BaseModel, copy: Path, name: str) -> None:
    """Raises ConfigError where another model wrote the answers."""
    answered_by = base_that_answered(str(copy))
    if answered_by is not None and (compare(answered_by, base.info.fingerprint) not in SAME_MODEL):
        raise ConfigError(
            f"{name} holds the answers of another model (fingerprint {answered_by}; "
            f"{base.info.name} has {base.info.fingerprint})",
            hint="name the model that answered, or record answers of this one",
        )


def take(copy: Path, rows: Sequence[Row], path: Path, room: float = float("inf")) -> Written:
    """Write rows of the copy, as they are, to a file of answers: as many as have `room` tokens."""
    lines, taken, tokens = copy.read_bytes().splitlines(keepends=True), list[bytes](), 0
    for row in rows:
        assert isinstance(row, AnswerRow), "read_answered gives no others"
        if taken and tokens + len(row.response_ids) > room:
            break
        taken.append(lines[row.row - 1])
        tokens += len(row.response_ids)
    said: dict[str, Any] | None = read_settings(copy)
    if said is not None:
        write_settings(path, said)
    with atomic_write(path, mode_of_copy(copy)) as temporary:
        temporary.write_bytes(b"".join(taken))
    return Written(len(taken), len(taken), tokens)


def _conversations(rows: Sequence[AnswerRow]) -> list[str]:
    """A name for each row, which the turns of a conversation share."""
    names, turns = [""] * len(rows), conversations([row.prompt_ids for row in rows])
    for number, group in enumerate(groups_of(range(len(rows)), turns)):
        for index in group:
            names[index] = str(number)
    return names


def _name(row: AnswerRow) -> str:
    """In an order that says nothing of the prompt."""
    return hashlib.sha256(json.dumps(row.prompt_ids).encode()).hexdigest()
