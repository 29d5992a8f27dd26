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

    `goes_on`: with the report at `path`: its parts are kept, broken ones too, but those left out
    for time. `only`: the parts whose name holds this. Raises ConfigError where none does, DataError
    where `path` is no report, DeviceLost where another process has to go on.
    """
    report = Report(device, dry_run, path, GOALS, goes_on)
    wanted = [part for part in parts(small=dry_run) if (only or "").lower() in part.name.lower()]
    if not wanted:
        raise ConfigError(
            f"--only {only!r} is in no part's name", hint="a part is named as in the tables: 8B"
        )
    for part in wanted:
        if part.name in report.records and report.records[part.name].status == "left out":
            del report.records[part.name]
    with _on(device), _as_written() if dry_run else contextlib.nullcontext():
        run_parts(wanted, Workbench(device, dry_run, report.figures), report, minutes)
    return report


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """For a dry run: what would be compiled, which takes minutes, runs as it is written; and in one
    thread, since several only wait for each other over so little.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.set_num_threads(threads)
