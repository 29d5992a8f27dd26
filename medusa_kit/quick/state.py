"""The record of a quick run on disk: settings, time spent, finished phases and their figures."""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from medusa_kit import console
from medusa_kit.base.origin import HEADS, compare, tell_unknown
from medusa_kit.errors import CheckpointError, ConfigError, MedusaKitError, first_found
from medusa_kit.files import parse_json, write_json
from medusa_kit.outputs import json_object
from medusa_kit.quick.settings import ANSWERS, COPY, FEATURES
from medusa_kit.train.run.lock import LOCK

RECORD = "quick.json"
LEAST_TESTED = "least_tested"  # a setting
HELD_OUT, RECIPE, RUN = "held_out.jsonl", "recipe.yaml", "run"
EARLIER = "run-{:g}h"  # of so many hours: finished heads of a run that was given more
EARLIER_NAME = r"run-[\d.e+-]+h"
REPORTS = ("report.json", "report.md")
PHASES = ("held_out", "answers", "training", "search", "verify", "bench")
Clock = Callable[[], float]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Phase(BaseModel):
    done: bool
    seconds: Seconds
    figures: dict[str, Any]


class _Record(BaseModel):
    """The contents of `quick.json`."""

    model_config = ConfigDict(extra="ignore")
    settings: dict[str, Any]
    seconds: Seconds
    running_since: Seconds | None  # since 1970
    phases: dict[str, _Phase]
    notes: dict[str, Any]


def begun_earlier(folder: Path) -> bool:
    """Whether a folder has a run that an earlier version began, which kept out fewer of few."""
    path = folder / RECORD
    record = json_object(path) if path.is_file() else None
    settings = (record or {}).get("settings")
    return isinstance(settings, dict) and LEAST_TESTED not in settings


class State:
    """`open` checks that the folder is this run's. Seconds are those of all processes together."""

    def __init__(self, folder: Path, settings: dict[str, Any], clock: Clock) -> None:
        self.folder, self._settings, self._clock = folder, settings, clock
        self._began = clock()
        self._before = 0.0
        self._phases: dict[str, dict[str, Any]] = {}
        self._notes: dict[str, Any] = {}
        self.was_finished = False  # when it was opened

    @property
    def path(self) -> Path:
        return self.folder / RECORD

    def check_own(self) -> None:
        """Raises ConfigError where quick.json is none that a run wrote: nothing beside it is
        removed then."""
        if not self.path.is_file():
            return
        record = json_object(self.path)
        cut_off = record is None and (self.folder / LOCK).is_file()
        if not cut_off and not {"settings", "phases"} <= (record or {}).keys():
            raise ConfigError(
                f"{self.path} is not that of a run", hint="name another folder with --output"
            )

    def check(self) -> None:
        """Raises ConfigError where the folder holds something else; changes nothing."""
        if not self.path.is_file():
            if self.folder.exists() and not self.folder.is_dir():
                raise ConfigError(
                    f"{self.folder} is a file; expected a folder for the results",
                    hint="name another with --output",
                )
            files = [p.name for p in self.folder.glob("*")] if self.folder.is_dir() else []
            if files := [name for name in files if not name.startswith(".")]:
                raise ConfigError(
                    f"{self.folder} holds other files ({', '.join(sorted(files)[:3])}), and no "
                    f"{RECORD} of a run to resume",
                    hint="name another folder with --output",
                )
            return
        if json_object(self.path) is not None:  # else it is damaged, and may be ours
            self.check_own()
        earlier = {"for": "kit", **self._read()["settings"]}  # older runs were for nothing else
        now = {**self._settings, "hours": earlier.get("hours")} if self.longer else self._settings
        names = sorted({*now, *earlier})
        different = [
            f"{name} {now.get(name)!r} ≠ {earlier.get(name)!r}"
            for name in names
            if now.get(name) != earlier.get(name)
        ]
        if different:
            raise ConfigError(
                f"{self.folder} holds a run with other settings (now ≠ then): "
                + "; ".join(different),
                hint="name another folder with --output, or add --fresh to start over; only a "
                "larger --hours resumes what is there",
            )

    @property
    def longer(self) -> bool:
        """Whether the run in the folder was begun with fewer hours."""
        then = self._read()["settings"].get("hours") if self.path.is_file() else None
        return isinstance(then, int | float) and then < self._settings.get("hours", 0.0)

    @property
    def finished(self) -> bool:
        """Whether the folder holds all that this run is to give."""
        if not self.path.is_file() or self.longer:
            return False
        phases = self._read()["phases"]
        return all(name in phases and phases[name]["done"] for name in PHASES)

    def of_other_heads(self, heads: str | None) -> bool:
        """Whether the training is done and left other heads than those of digest `heads`, which
        are there now. A line says so where an earlier version did not write which they were."""
        record = self._read() if self.path.is_file() else {"phases": {}}
        if not record["phases"].get("training", {}).get("done"):
            return False
        compared = compare(record["notes"], {HEADS: heads or "none"})
        tell_unknown(self.path, compared.unknown)
        return bool(compared.other)

    def open(self, fresh: bool, changed: bool = False) -> None:
        """Go on with what is there, or with `fresh` remove it; the clock runs from now. `changed`:
        the heads are others than they were, and what was measured of them is measured again. Of a
        finished run nothing is written."""
        if fresh and self.path.is_file():
            self.check_own()
            self._remove()
        else:
            self.check()
        if self.path.is_file():
            record = self._read()
            self._before, self._phases = record["seconds"], record["phases"]
            self._notes = record["notes"]
            if record["running_since"] is not None:  # killed: nobody wrote down how long it ran
                self._add_lost(max(0.0, _last_change(self.folder) - record["running_since"]))
            if self.longer:
                self._extend(record["settings"]["hours"])
            elif changed:
                self._run_anew(PHASES[2:])
                self._remove_reports()
                console.note(f"{self.folder / RUN} holds other heads than this run trained: they "
                             "are searched, verified and measured anew")  # fmt: skip
        if all(map(self.done, PHASES)):
            self._clock = lambda: 0.0  # it only reports what came of it
            self._began, self.was_finished = 0.0, True
            return
        self._began = self._clock()
        self.save()

    def _extend(self, hours: float) -> None:
        """Make the run write more answers, then train new heads on all of them. Finished
        heads of fewer hours are kept."""
        if (self.folder / RUN / "run.json").is_file():
            earlier = self.folder / EARLIER.format(hours)
            shutil.rmtree(earlier, ignore_errors=True)
            (self.folder / RUN).rename(earlier)
            console.note(f"the heads of {hours:g} hours are kept in {earlier}")
        shutil.rmtree(self.folder / RUN, ignore_errors=True)
        (self.folder / RECIPE).unlink(missing_ok=True)
        self._remove_reports()
        if "answers" in self._phases:
            self._phases["answers"] = {**self._phases["answers"], "done": False, "figures": {}}
        self._run_anew(PHASES[2:])
        console.note("more time than before: more answers, then new heads on all of them")

    def _remove_reports(self) -> None:
        for name in REPORTS:
            (self.folder / name).unlink(missing_ok=True)

    def _run_anew(self, phases: Sequence[str]) -> None:
        """What they took before does not count."""
        for name in phases:
            self._before -= self._phases.pop(name, {"seconds": 0.0})["seconds"]
        self._before = max(0.0, self._before)

    def _add_lost(self, seconds: float) -> None:
        self._before += seconds
        for name, phase in self._phases.items():
            if not phase["done"]:
                self._phases[name] = {**phase, "seconds": phase["seconds"] + seconds}
                return

    def _read(self) -> dict[str, Any]:
        try:
            return _Record.model_validate(parse_json(self.path.read_text())).model_dump()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {first_found(error)}",
                hint="add --fresh to start over",
            ) from error

    def _remove(self) -> None:
        """Remove what a run wrote, and nothing else in the folder."""
        earlier = [p for p in self.folder.iterdir() if re.fullmatch(EARLIER_NAME, p.name)]
        for folder in (self.folder / RUN, self.folder / FEATURES, *earlier):
            shutil.rmtree(folder, ignore_errors=True)
        for name in (ANSWERS, HELD_OUT, COPY):
            for path in (name, f"{name}.meta.json"):
                (self.folder / path).unlink(missing_ok=True)
        for name in (RECIPE, *REPORTS, RECORD):
            (self.folder / name).unlink(missing_ok=True)

    def seconds(self) -> float:
        """Seconds spent so far, by all processes of the run."""
        return self._before + self._clock() - self._began

    def done(self, phase: str) -> bool:
        return bool(self._phases.get(phase, {}).get("done"))

    def figures(self, phase: str) -> dict[str, Any]:
        return dict(self._phases.get(phase, {}).get("figures", {}))

    def phase_seconds(self, phase: str) -> float:
        return float(self._phases.get(phase, {}).get("seconds", 0.0))

    def recall(self, name: str) -> Any:
        """The value that was noted under this name, None if there is none."""
        return self._notes.get(name)

    def note(self, name: str, value: Any) -> None:
        self._notes[name] = value
        self.save()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """A phase, which is done when the body ends; what it puts into the dict are its figures."""
        began, before = self._clock(), self.phase_seconds(name)
        figures: dict[str, Any] = {}
        done = False
        self._phases[name] = {"done": done, "seconds": before, "figures": figures}
        self.save()
        try:
            yield figures
            done = True
        finally:
            seconds = before + self._clock() - began
            self._phases[name] = {"done": done, "seconds": seconds, "figures": figures}
            self.save()

    def save(self, running: bool = True) -> None:
        """Write the record. Raises MedusaKitError where the disk is full."""
        record = {
            "settings": self._settings,
            "seconds": self.seconds(),
            "running_since": time.time() if running else None,
            "phases": self._phases,
            "notes": self._notes,
        }
        try:
            write_json(self.path, record)
        except OSError as error:
            raise MedusaKitError(
                f"cannot write to {self.folder}: {error.strerror}",
                hint="make room, or name another folder with --output",
            ) from error


def _last_change(folder: Path) -> float:
    """When a file below the folder was last written to. Hidden ones don't count: this process has
    taken the lock by now."""
    times = [0.0]
    for path in folder.rglob("[!.]*"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
