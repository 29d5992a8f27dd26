"""`medusa-kit doctor --gpu`: whether the GPU path works on this machine, as tables or as JSON."""

import json
from typing import Annotated, Any

import typer

from medusa_kit.cli import options
from medusa_kit.errors import MedusaKitError, UsageError

OTHER_OPTIONS = {"model_argument": "MODEL", "model": "--model", "heads": "--heads",
                 "data": "--data", "limit": "--limit", "tolerance": "--tolerance",
                 "dtype": "--dtype"}  # fmt: skip

Gpu = Annotated[
    bool,
    typer.Option(
        "--gpu",
        help="Check this machine's GPU instead, with random weights in the shape of a real model: "
        "versions, self-check, captured forwards, steps. No model, no data, no network.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="With --gpu: the same on a tiny shape, on the CPU.")
]


def check_options(context: typer.Context, gpu: bool) -> None:
    """Raises UsageError for options that do not go together."""
    given = {name for name in context.params if options.was_given(context, name)}
    for name, option in OTHER_OPTIONS.items() if gpu else ():
        if name in given:
            raise UsageError(
                f"{option} has no meaning with --gpu, which takes random weights",
                hint="leave one of them out",
            )
    if not gpu and "dry_run" in given:
        raise UsageError("--dry-run has no meaning without --gpu", hint="add --gpu")
    if {"dry_run", "device"} <= given:
        raise UsageError(
            "--device has no meaning with --dry-run, which is on the CPU", hint="leave it out"
        )


def run(dry_run: bool, as_json: bool, device: str) -> None:
    """Raises MedusaKitError where the GPU path does not work at all."""
    from medusa_kit.bench.gpu.check import examine_gpu, print_findings

    found = examine_gpu(gpu_of(device, dry_run), dry_run)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_findings(found)


def gpu_of(device: str, dry_run: bool) -> Any:
    """Raises UsageError for a CPU, MedusaKitError where there is no GPU."""
    import torch

    from medusa_kit.base.placement import pick_device

    if dry_run:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MedusaKitError(
            "there is no GPU to check: torch sees no CUDA device",
            hint="`medusa-kit doctor --gpu --dry-run` walks through it on a CPU",
        )
    picked = pick_device(device)
    if picked.type != "cuda" or (picked.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {device} is no GPU of this machine, which is what --gpu checks",
            hint="leave it out, or give cuda or cuda:N; --dry-run is on the CPU",
        )
    return torch.device("cuda", picked.index or 0)
