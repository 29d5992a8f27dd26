"""FILE.meta.json beside a file of answers: the settings that its rows were made with."""

from pathlib import Path
from typing import Any

from medusa_kit.base.origin import BASE
from medusa_kit.base.tokenizer.encoding_digest import ENCODING, Encodings, compare
from medusa_kit.errors import DataError
from medusa_kit.files import link_target, parse_json, write_json
from medusa_kit.paths import expanded


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


def write_settings(answers: Path, settings: dict[str, Any]) -> None:
    write_json(settings_path(answers), settings)


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
    return compare(settings.get(ENCODING), encoding)


def _settings_of(source: str) -> dict[str, Any] | None:
    path = expanded(source)
    return read_settings(path) if path.is_file() else None
