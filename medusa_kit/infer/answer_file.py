"""The file answers are appended to: resumable, and never a mix of two settings.

Beside FILE lies FILE.meta.json with the settings its rows were made with, from the first row on: a
run that fails before leaves neither.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.errors import ConfigError, DataError, MedusaKitError
from medusa_kit.files import atomic_write


class AnswerFile:
    """`done`: ids of the rows that are there already; a half-written last line is cut off."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises ConfigError when the file was made with other settings, DataError when broken."""
        self.path = Path(path)
        if self.path.is_dir():
            raise ConfigError(f"{path} is a folder; expected a file to write answers to")
        self._meta = self.path.with_name(self.path.name + ".meta.json")
        self._settings = settings
        self.done: set[str] = set()
        if self.path.is_file() and self.path.stat().st_size:
            self._check_settings(settings)
            self._read_done()
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # told before an hour of answers

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Write rows and see them to the disk. Raises MedusaKitError when it is full."""
        before = self.path.stat().st_size if self.path.is_file() else 0
        text = "".join(json.dumps(record) + "\n" for record in records)
        try:
            if not before:
                self._write_settings()
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            if not before:
                self.path.unlink(missing_ok=True)
                self._meta.unlink(missing_ok=True)
            else:
                os.truncate(self.path, before)  # shrinking needs no room
            raise MedusaKitError(
                f"cannot write to {self.path}: {error.strerror}; {len(self.done)} rows are safe",
                hint="make room, then run the same command again: it goes on from there",
            ) from error
        self.done.update(record["id"] for record in records)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        if not self._meta.is_file():
            raise ConfigError(
                f"{self.path} exists, but {self._meta.name} is missing, so it is unknown how its "
                "rows were made",
                hint="choose another output file",
            )
        there = self._read_settings()
        differing = [
            f"{key}: {settings.get(key)!r} ≠ {there.get(key)!r}"
            for key in sorted({*settings, *there})
            if settings.get(key) != there.get(key)
        ]
        if differing:
            raise ConfigError(
                f"{self.path} holds answers made with other settings (now ≠ then): "
                + "; ".join(differing),
                hint="choose another output file",
            )

    def _read_settings(self) -> dict[str, Any]:
        try:
            there = json.loads(self._meta.read_text())
        except ValueError as error:  # no JSON, or no text
            raise DataError(f"{self._meta} is no JSON: {error}") from error
        if not isinstance(there, dict):
            raise DataError(f"{self._meta} holds a {type(there).__name__}, expected settings")
        return there

    def _write_settings(self) -> None:
        with atomic_write(self._meta) as temporary:
            temporary.write_text(json.dumps(self._settings, indent=2) + "\n")

    def _read_done(self) -> None:
        raw = self.path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):
            console.warn(f"{self.path}: the last line was cut off; it is dropped and made again")
            os.truncate(self.path, whole)
        for number, line in enumerate(raw[:whole].splitlines(), start=1):
            try:
                self.done.add(str(json.loads(line)["id"]))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{self.path}:{number} is no answer row: {error}") from error
