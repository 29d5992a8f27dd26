"""The whole run: device, plan, budget, report."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from medusa_kit.bench.gpu.plan import GOALS, parts
from medusa_kit.bench.gpu.report import Report
from medusa_kit.bench.gpu.runner import run_parts
from medusa_kit.bench.gpu.workbench import Workbench
from medusa_kit.errors import ConfigError


def measure(
    device: torch.device,
    dry_run: bool = False,
    path: Path | None = None,
    minutes: float = 9.0,
    goes_on: bool = False,
    only: str | None = None,
) -> Report:
    """Run the parts, saving the report at `path` behind each.

    `goes_on`: with the report at `path`, whose parts are kept but those left out for time. `only`:
    parts whose name holds this, which then are measured anew. Raises ConfigError where no part
    does, DataError where `path` is no report, DeviceLost with parts left.
    """
    report = Report(device, dry_run, path, GOALS, goes_on)
    wanted = [part for part in parts(small=dry_run) if (only or "").lower() in part.name.lower()]
    if not wanted:
        raise ConfigError(
            f"--only {only!r} is in no part's name", hint="a part is named as in the tables: 8B"
        )
    for part in wanted:
        record = report.records.get(part.name)
        if record is not None and (only is not None or record.status == "left out"):
            del report.records[part.name]
    with _on(device), _as_written() if dry_run else contextlib.nullcontext():
        run_parts(wanted, Workbench(device, dry_run, report.figures), report, minutes)
    return report


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """For a dry run: what would be compiled, which takes minutes, runs as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield
