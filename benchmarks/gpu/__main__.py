"""The first 45 minutes on a real GPU, in five commands of under nine minutes each.

    python benchmarks/gpu/wheels.py build/wheels     on a machine with a network, before
    PYTHONPATH=build/wheels python -m benchmarks.gpu 1 --output DIR
    python -m benchmarks.gpu 1 --output DIR --dry-run     tiny shapes, on a stand-in for the device

Writes DIR/command_N.json after each part, and prints its tables; --continue measures what that file
lacks. Exit code 1 where a part failed.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import stand_in
from benchmarks.gpu.commands import COMMANDS, find, measure, on
from benchmarks.gpu.runner import DeviceLost
from benchmarks.gpu.tables import print_report
from benchmarks.gpu.workbench import Workbench
from medusa_kit import console
from medusa_kit.errors import MedusaKitError

MINUTES = 8.5


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    asked = _parser().parse_args(arguments)
    device, path = torch.device("cuda", 0), asked.output / f"command_{asked.command}.json"
    try:
        with stand_in.installed() if asked.dry_run else contextlib.nullcontext():
            if not torch.cuda.is_available():
                raise MedusaKitError("torch sees no CUDA device", hint="--dry-run needs none")
            if asked.part is not None:
                return _alone(asked, device)
            left = asked.minutes - (time.monotonic() - began) / 60
            report = measure(
                asked.command, device, asked.dry_run, path, left, asked.goes_on, asked.only
            )
    except DeviceLost as error:
        console.warn(f"{error}: the device no longer answers, so a new process continues")
        minutes = max(0.0, asked.minutes - (time.monotonic() - began) / 60)
        again = [*(sys.argv[1:] if arguments is None else arguments), "--continue"]
        command = [sys.executable, "-m", "benchmarks.gpu", *again, "--minutes", f"{minutes:.3f}"]
        sys.stdout.flush()
        os.execv(sys.executable, command)
    except MedusaKitError as error:
        console.err.print(f"error: {error}", markup=False, highlight=False)
        return error.exit_code
    print_report(report)
    console.note(f"saved as {path}")
    if report.broken:
        console.err.print(f"error: {len(report.broken)} parts failed", highlight=False)
    return 1 if report.broken or report.unsaved else 0


def _alone(asked: argparse.Namespace, device: torch.device) -> int:
    """One part in this process, whose environment differs: its figures on stdout."""
    part = find(asked.command, asked.part, asked.dry_run)
    with on(device, asked.dry_run):
        figures = part.run(Workbench(device, asked.dry_run, lambda name: {}, asked.output))
    print(json.dumps(dict(figures)))
    return 0


def _parser() -> argparse.ArgumentParser:
    titles = "; ".join(f"{number} {title}" for number, (title, _) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("command", type=int, choices=list(COMMANDS), help=titles)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no GPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time budget")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="what DIR lacks")
    parser.add_argument("--only", metavar="TEXT", help="parts whose names contain this")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # one alone, for processes.py
    return parser


if __name__ == "__main__":
    sys.exit(main())
