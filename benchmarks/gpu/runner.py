"""Runs parts one by one within a time budget; failures are recorded and the rest goes on."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.report import Record, Report
from benchmarks.gpu.workbench import Cannot, Workbench, ran_out_of_memory
from medusa_kit import console
from medusa_kit.bench.time_limit import time_limit
from medusa_kit.errors import MedusaKitError

MIN_SECONDS = 3.0  # a part is not begun with less of the budget left
TRACEBACK_LINES = 12
GB = 1e9


@dataclass(frozen=True)
class Part:
    """One measurement. `needs`: the seconds that must be left of the budget to begin it.

    Its name begins with that of `shape`, if it has one; parts of one kind share a table.
    """

    name: str
    kind: str
    run: Callable[[Workbench], Mapping[str, Any]]
    needs: float = MIN_SECONDS
    shape: str = ""


class OutOfTime(BaseException):
    """The budget ended inside a part. Not an Exception, so that no part can catch it."""


class DeviceLost(Exception):
    """The device can no longer be used in this process, as after an illegal access."""


def run_parts(parts: Sequence[Part], bench: Workbench, report: Report, minutes: float) -> None:
    """Run the parts that the report has no record of, and save it after each.

    Raises DeviceLost if parts are left, with which another process can continue.
    """
    ends = time.monotonic() + 60 * minutes
    with console.progress("measuring", len(parts), "parts") as bar:
        for part in parts:
            if part.name not in report.records:
                _run(part, bench, report, ends)
            bar.advance(note=part.name)
    report.finished = True
    report.save()


def _run(part: Part, bench: Workbench, report: Report, ends: float) -> None:
    measured, left = not report.dry_run, ends - time.monotonic()
    if left < part.needs:
        why = f"no time: {max(0.0, left):.0f} s were left; it takes about {part.needs:.0f} s"
        report.add(Record(part.name, part.kind, part.shape, "left out", measured, why=why))
        return
    report.save(running=part.name)
    bench.collect()  # KV caches of the part before, which refer to themselves
    _forget_peak(bench.device)
    start = time.monotonic()
    try:
        outcome = _outcome(part, bench, left)
    except KeyboardInterrupt:
        report.save()  # no part is in progress now
        raise
    seconds = round(time.monotonic() - start, 2)
    broken = outcome["status"] in ("failed", "out of memory")
    lost = broken and _is_lost(bench.device)
    peak = None if lost else _peak_gb(bench.device)
    about: dict[str, Any] = {
        "name": part.name,
        "kind": part.kind,
        "shape": part.shape,
        "measured": measured,
    }
    report.add(Record(**about, seconds=seconds, peak_gb=peak, **outcome))
    if broken:
        console.warn(f"{part.name}: {outcome['why']}")
    if lost:
        raise DeviceLost(outcome["why"])
    if broken:
        bench.clear()


def _outcome(part: Part, bench: Workbench, left: float) -> dict[str, Any]:
    """Status, and figures or the reason why there are none. Returns no exception, since its
    traceback would keep tensors alive."""
    try:
        with time_limit(left, OutOfTime):
            return {"status": "done", "figures": dict(part.run(bench))}
    except OutOfTime:
        return {"status": "left out", "why": f"stopped: the time was up after {left:.0f} s"}
    except Cannot as error:
        return {"status": "cannot", "why": error.message}
    except Exception as error:  # anything may be raised on a device
        if ran_out_of_memory(error):
            return {"status": "out of memory", "why": _first_line(error)}
        where = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
        return {"status": "failed", "why": _said(error), "where": "\n".join(where)}


def _said(error: Exception) -> str:
    if isinstance(error, MedusaKitError):
        return error.message
    line, kind = _first_line(error), type(error).__name__
    return line if line == kind else f"{kind}: {line}"


def _first_line(error: Exception) -> str:
    """The first line of the message; the error's name if that is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _is_lost(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_gb(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return round(torch.cuda.max_memory_allocated(device) / GB, 3)
