"""The report: the result of every part, saved after each, so that a crash loses little.

`running` in the file names the part in progress: a run that continues knows that this part ended
the process.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from medusa_kit import console
from medusa_kit.bench.gpu.setup import describe
from medusa_kit.errors import DataError, MedusaKitError
from medusa_kit.files import atomic_write

KIND, VERSION = "medusa-kit gpu report", 2
NO_MEASUREMENT = "dry run on tiny shapes, without a GPU: no figure in here is a measurement"

Status = Literal["done", "failed", "out of memory", "cannot", "left out"]
BROKEN: tuple[Status, ...] = ("failed", "out of memory")
# Figures of one report share these; other values need another report.
SAME = ("device", "medusa_kit", "cuda", "torch", "transformers", "triton")


@dataclass(frozen=True)
class Record:
    """The result of one part. `why`: the error, or the reason why there are no figures."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # for reading from a file

    name: str
    kind: str
    shape: str
    status: Status
    measured: bool  # False in a dry run
    figures: dict[str, Any] = field(default_factory=dict)
    why: str | None = None
    where: str | None = None  # the end of an error's traceback
    seconds: float = 0.0
    peak_gb: float | None = None  # of the device's memory, in tensors


@dataclass(frozen=True)
class Goal:
    """`figure` of the part `part` should be at most, or at least, `limit`."""

    name: str
    part: str
    figure: str
    limit: float
    at_least: bool = False

    def judged(self, figures: Mapping[str, Any], measured: bool) -> dict[str, Any]:
        """`met` is None where nothing was measured."""
        value, met = figures.get(self.figure), None
        if measured and value is not None:
            met = value >= self.limit if self.at_least else value <= self.limit
        sign = "at least" if self.at_least else "at most"
        goal = f"{self.name}: {sign} {self.limit:g}"
        return {"goal": goal, "figure": value, "met": met, "part": self.part}


class Report:
    """Records by name, in the order in which parts were run. `path`: where it is saved, if at all.

    Raises DataError with `goes_on` where `path` holds no report of this kind of run on this device.
    `unsaved`: why the latest state could not be saved, where an earlier one could.
    """

    def __init__(
        self,
        device: torch.device,
        dry_run: bool,
        path: Path | None,
        goals: Sequence[Goal] = (),
        goes_on: bool = False,
    ) -> None:
        self.path, self.dry_run, self._goals = path, dry_run, goals
        self.setup = describe(device)
        self.records: dict[str, Record] = {}
        self.finished = False
        self.unsaved: str | None = None
        self._was_saved = False
        if goes_on:
            assert path is not None
            self.records = _read(path, dry_run, self.setup)

    def add(self, record: Record) -> None:
        self.records[record.name] = record
        self.save()

    def figures(self, name: str) -> Mapping[str, Any]:
        """The figures of a part that is done; empty for any other."""
        record = self.records.get(name)
        return record.figures if record is not None and record.status == "done" else {}

    @property
    def broken(self) -> list[Record]:
        return [record for record in self.records.values() if record.status in BROKEN]

    @property
    def goals(self) -> list[dict[str, Any]]:
        measured = not self.dry_run
        return [goal.judged(self.figures(goal.part), measured) for goal in self._goals]

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "version": VERSION,
            "dry_run": self.dry_run,
            **({"note": NO_MEASUREMENT} if self.dry_run else {}),
            "finished": self.finished,
            "setup": self.setup,
            "goals": self.goals,
            "parts": [asdict(record) for record in self.records.values()],
        }

    def save(self, running: str | None = None) -> None:
        """Raises MedusaKitError where the first write fails; later failures are warnings, so that
        measurements of minutes are not lost."""
        if self.path is None:
            return
        content = self.as_dict() | ({"running": running} if running else {})
        try:
            with atomic_write(self.path) as temporary:
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            why = f"the report cannot be saved as {self.path}: {error}"
            if not self._was_saved:
                raise MedusaKitError(why, hint="name another folder with --output") from error
            if self.unsaved is None:
                console.warn(f"{why}; continuing without")
            self.unsaved = why
        else:
            self._was_saved, self.unsaved = True, None


def _read(path: Path, dry_run: bool, setup: Mapping[str, Any]) -> dict[str, Record]:
    """Records of an earlier run; the part in which its process ended counts as failed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content["kind"], content["version"], content["dry_run"]) != (KIND, VERSION, dry_run):
            raise ValueError("its kind, version or dry_run differs")
        for name in SAME:
            if (was := content["setup"][name]) != setup[name]:
                raise ValueError(f"its {name} is {was}, but here {name} is {setup[name]}")
        records = {
            one.name: one for one in TypeAdapter(list[Record]).validate_python(content["parts"])
        }
        if (running := content.get("running")) is not None and not isinstance(running, str):
            raise ValueError(f"running is {running!r}; expected the name of a part")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a report to continue: {_wrong(error)}", hint="leave out --continue"
        ) from error
    if running is not None:
        why = "the process ended while it ran"
        records[running] = Record(running, "", "", "failed", not dry_run, why=why)
    return records


def _wrong(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{first['msg']} (parts.{'.'.join(map(str, first['loc']))})"
    return str(error)
