"""What lies beside a file of answers: FILE.meta.json, the settings its rows were made with."""

import json
from pathlib import Path
from typing import Any

from medusa_kit.errors import DataError

BASE_FINGERPRINT = "base_fingerprint"


def settings_path(answers: Path) -> Path:
    return answers.with_name(answers.name + ".meta.json")


def read_settings(answers: Path) -> dict[str, Any] | None:
    """None where nothing lies beside the file. Raises DataError for what is no such settings."""
    path = settings_path(answers)
    if not path.is_file():
        return None
    try:
        there = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no text
        raise DataError(f"{path} is no JSON: {error}") from error
    if not isinstance(there, dict):
        raise DataError(f"{path} holds a {type(there).__name__}, expected settings")
    return there


def base_that_answered(source: str) -> str | None:
    """Fingerprint of the base whose words a file holds; None where it is not said."""
    path = Path(source).expanduser()
    settings = read_settings(path) if path.is_file() else None
    return None if settings is None else settings.get(BASE_FINGERPRINT)
