"""`medusa-kit doctor --gpu`: what the GPU path does on this machine, as tables and as JSON."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from medusa_kit import console
from medusa_kit.cli import options
from medusa_kit.errors import MedusaKitError, UsageError

DEFAULT_MINUTES = 9.0
MOST_MINUTES = 1440.0
DEFAULT_OUTPUT = Path("gpu_report.json")
OWN_OPTIONS = {"dry_run": "--dry-run", "output": "--output", "minutes": "--minutes",
               "goes_on": "--continue", "only": "--only"}  # fmt: skip
OTHER_OPTIONS = {"model_argument": "MODEL", "model": "--model", "heads": "--heads",
                 "data": "--data", "limit": "--limit", "tolerance": "--tolerance",
                 "dtype": "--dtype"}  # fmt: skip

Gpu = Annotated[
    bool,
    typer.Option(
        "--gpu",
        help="Measure this machine's GPU instead, with random weights in the shapes of real models:"
        " steps, answers, attention, training. No model, no data, no network.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="With --gpu: run all of it on tiny shapes, on the CPU.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        dir_okay=False,
        help="With --gpu: JSON file, saved after each part; default: gpu_report.json (none in a "
        "dry run).",
    ),
]
Minutes = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=MOST_MINUTES,
        help="With --gpu: time budget; parts that do not fit are left out.",
    ),
]
GoesOn = Annotated[
    bool,
    typer.Option("--continue", help="With --gpu: resume; measure what the file of --output lacks."),
]
Only = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="With --gpu: only parts whose name contains this."),
]


@dataclass(frozen=True)
class Asked:
    """The options of `doctor --gpu`."""

    dry_run: bool
    output: Path | None
    minutes: float
    goes_on: bool
    only: str | None
    as_json: bool
    device: str

    @property
    def path(self) -> Path | None:
        """A real run is always saved, since it may be cut short."""
        return self.output or (None if self.dry_run else DEFAULT_OUTPUT)


def check_options(context: typer.Context, gpu: bool) -> None:
    """Raises UsageError for options that do not go together."""
    given = {name for name in context.params if options.was_given(context, name)}
    for name, option in (OTHER_OPTIONS if gpu else OWN_OPTIONS).items():
        if name in given and gpu:
            raise UsageError(
                f"{option} has no meaning with --gpu, which measures random weights",
                hint="leave one of them out",
            )
        if name in given:
            raise UsageError(f"{option} has no meaning without --gpu", hint="add --gpu")
    if {"dry_run", "device"} <= given:
        raise UsageError(
            "--device has no meaning with --dry-run, which is on the CPU", hint="leave it out"
        )
    if {"dry_run", "goes_on"} <= given and "output" not in given:
        raise UsageError("a dry run is not saved unless --output names a file to resume from")


def run(asked: Asked) -> None:
    """Measure, save, print; exit code 1 where a part failed."""
    began = time.monotonic()  # a cold machine takes a while to load torch and transformers

    def left() -> float:
        return asked.minutes - (time.monotonic() - began) / 60

    from medusa_kit.bench.gpu.measure import measure
    from medusa_kit.bench.gpu.runner import DeviceLost
    from medusa_kit.bench.gpu.tables import print_report

    device = _device(asked)
    try:
        report = measure(device, asked.dry_run, asked.path, left(), asked.goes_on, asked.only)
    except DeviceLost as error:
        console.warn(f"{error}: the device no longer answers, so a new process resumes")
        _in_a_new_process(asked, left())
    if asked.as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_report(report)
    number = "1 part" if len(report.broken) == 1 else f"{len(report.broken)} parts"
    errors = [f"{number} failed"] if report.broken else []
    if report.unsaved is not None:
        errors.append(report.unsaved)
    elif asked.path is not None:
        console.note(f"saved as {asked.path}")
    for line in errors:
        console.err.print(f"error: {line}", style="bold red", markup=False, highlight=False)
    if errors:
        raise typer.Exit(1)


def _device(asked: Asked) -> Any:
    """Raises UsageError for a CPU, MedusaKitError where there is no GPU."""
    import torch

    from medusa_kit.base.placement import pick_device

    if asked.dry_run:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MedusaKitError(
            "there is no GPU to measure: torch sees no CUDA device",
            hint="--dry-run walks through the whole of it on tiny shapes, on the CPU",
        )
    device = pick_device(asked.device)
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {asked.device} is no GPU of this machine, which is what --gpu measures",
            hint="leave it out, or give cuda or cuda:N; --dry-run is on the CPU",
        )
    return torch.device("cuda", device.index or 0)


def _in_a_new_process(asked: Asked, minutes: float) -> NoReturn:
    """Replaces this process: what a lost device holds is freed only when the process ends."""
    command = [sys.executable, "-m", "medusa_kit", "doctor", "--gpu", "--continue"]
    command += ["--output", str(asked.path), "--minutes", f"{max(minutes, 0.0):.3f}"]
    command += ["--device", asked.device, *(["--json"] if asked.as_json else [])]
    command += [] if asked.only is None else ["--only", asked.only]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)
