"""FILE.meta.json beside a file of answers: the settings that its rows were made with.

answer_digests.py has what tells rows that were not.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.origin import BASE
from medusa_kit.base.tokenizer.encoding_digest import ENCODING, Encodings, compare
from medusa_kit.data.answer_digests import FORM, VERSION, Rows, check_rows
from medusa_kit.data.sources import read_items
from medusa_kit.errors import ConfigError, DataError
from medusa_kit.files import link_target, parse_json, write_json
from medusa_kit.paths import expanded
from medusa_kit.settings.engine import FLOAT32

SERVED = "served"  # in the settings: requests of a server, each with a length of its own
ACTIVATIONS = "activations"  # there, the precision of answers that were not made in float32


def settings_path(answers: Path) -> Path:
    """The path of a file's settings: beside the file that a link points to, so that links share
    them."""
    return _beside(link_target(answers))


def _beside(answers: Path) -> Path:
    return answers.with_name(answers.name + ".meta.json")


def read_settings(answers: Path) -> dict[str, Any] | None:
    """The settings, None where there are none. Raises DataError for a file that holds none."""
    paths = (settings_path(answers), _beside(answers))  # earlier versions wrote beside the link
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    try:
        settings = parse_json(path.read_text())
    except ValueError as error:  # not JSON, or not text
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} holds a {type(settings).__name__}, expected settings")
    return settings


def activations_in(settings: Mapping[str, Any]) -> str:
    """The precision of activations in which a file's answers were made."""
    return str(settings.get(ACTIVATIONS, FLOAT32))


def write_settings(answers: Path, settings: dict[str, Any]) -> None:
    write_json(settings_path(answers), settings)


def with_form(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file whose rows all say what made them."""
    return {**settings, FORM: VERSION}


def compared_rows(answers: Path, settings: Mapping[str, Any], hint: str) -> Rows:
    """The rows of a file against its settings. Raises ConfigError where one was made with others:
    of other doubtful rows, `tell_doubtful` tells."""
    rows = check_rows(answers, settings)
    if rows.other:
        raise ConfigError(
            f"{answers} holds rows that were not made as {settings_path(answers).name} says: "
            f"{rows.in_words()}",
            hint=hint,
        )
    return rows


def tell_doubtful(answers: Path, rows: Rows) -> None:
    """In at most one line, the rows of which it could not be told what made them."""
    name = settings_path(answers).name
    if rows.doubtful:
        console.warn(
            f"{answers}: no run that {name} tells of wrote {rows.in_words()}, so it could not be "
            "checked which model answered there"
        )
    elif rows.num_earlier:
        console.note(
            f"{answers}: {rows.num_earlier} rows do not say with what they were made, so it could "
            f"not be checked that {name} is theirs: an earlier version wrote them, or a person"
        )


def base_that_answered(source: str) -> str | None:
    """Fingerprint of the base that wrote a file's answers; None where it is not known."""
    settings = _settings_of(source)
    return None if settings is None else settings.get(BASE)


def how_encoded(source: str, encoding: str | None) -> Encodings:
    """How the prompts of a file of answers were encoded, against `encoding`. Other sources are
    encoded when they are read, and a base without a tokenizer encodes nothing: SAME."""
    settings = _settings_of(source)
    if settings is None or encoding is None:
        return Encodings.SAME
    if rows_of(source).doubtful:
        return Encodings.UNKNOWN
    return compare(settings.get(ENCODING), encoding)


def rows_of(source: str) -> Rows:
    """What the rows of a source say against the settings beside it, where there are some."""
    path, settings = expanded(source), _settings_of(source)
    if settings is None:
        return Rows()
    now = path.stat()
    stamp = (now.st_ino, now.st_size, now.st_mtime_ns)
    return _read_rows(path, json.dumps(settings, sort_keys=True), stamp)


@lru_cache(maxsize=16)
def _read_rows(path: Path, settings: str, _: tuple[int, ...]) -> Rows:
    """A large file takes seconds, and is asked about more than once."""
    return check_rows(path, parse_json(settings))


def warn_of_other_rows(source: str) -> None:
    """In at most one line, of which answers in a source it cannot be told which model wrote them:
    of doubtful rows, and of answers as token ids without settings beside them."""
    path = expanded(source)
    if _settings_of(source) is not None:
        tell_doubtful(path, rows_of(source))
        return
    first = next(read_items(source), None) if path.is_file() else None
    if first is not None and isinstance(first[1], dict) and "response_ids" in first[1]:
        console.note(
            f"{source} has no {settings_path(path).name} with it, so it could not be checked "
            "which model wrote its answers"
        )


def _settings_of(source: str) -> dict[str, Any] | None:
    path = expanded(source)
    return read_settings(path) if path.is_file() else None
