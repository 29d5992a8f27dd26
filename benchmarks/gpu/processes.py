"""A part once more in a process of its own, with another environment."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import Part
from benchmarks.gpu.workbench import Workbench
from medusa_kit.errors import MedusaKitError

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240.0


def apart(command: int, part: Part, environment: Mapping[str, str], told: str) -> Part:
    """The part of a command as it runs with these variables, which torch reads once."""

    def run(bench: Workbench) -> Mapping[str, Any]:
        bench.clear()  # the other process needs the memory
        arguments = [str(command), "--part", part.name, "--output", str(bench.folder)]
        arguments += ["--dry-run"] if bench.small else []
        said = finished(["-m", "benchmarks.gpu", *arguments], LIMIT_SECONDS, environment)
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        if floor := bench.figures(part.name).get("floor_ms"):  # that process has no bandwidth
            found |= {"floor_ms": floor, "times_floor": found["ms"] / floor}
        return found

    return replace(part, name=f"{part.name}, {told}", run=run, needs=part.needs + 30)


def finished(
    arguments: list[str], seconds: float, environment: Mapping[str, str] | None = None
) -> str:
    """What a process of this Python says on stdout. Raises MedusaKitError where it fails."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **(environment or {})},
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise MedusaKitError(f"it took more than {seconds:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise MedusaKitError(f"it ended with exit code {done.returncode}: {last}")
    return done.stdout
