"""metrics.jsonl of a run. A checkpoint notes how many lines it had and their digest, so that a run
that goes on keeps them, and those of nothing else."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.files import parse_json

METRICS = "metrics.jsonl"
LINES, DIGEST = "metric_lines", "metrics"  # in progress.json
JUDGED, TRAINED = {"step", "held_out"}, {"step", "head_loss"}  # keys that every line has


def lines_of(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def noted(path: Path) -> dict[str, Any]:
    """What a checkpoint says of the lines that are there."""
    lines = lines_of(path)
    return {LINES: len(lines), DIGEST: _digest(lines)}


def check(path: Path, progress: Mapping[str, Any]) -> None:
    """Raises ConfigError where the lines before a checkpoint are others than it was written with.
    Earlier versions did not note which these were."""
    count, expected = progress.get(LINES), progress.get(DIGEST)
    if path.is_file() and expected not in (None, _digest(lines_of(path)[:count])):
        raise ConfigError(
            f"{path} does not begin with the {count} lines that this run had written, "
            "and the run would replace it when it resumes",
            hint="move it away, or put back the run's own",
        )


def kept(path: Path, progress: Mapping[str, Any]) -> list[str]:
    """The lines that were written before the checkpoint."""
    lines = lines_of(path)
    if LINES in progress:
        return lines[: progress[LINES]]
    return [line for line in lines if _step_of(line) <= progress["step"]]  # an older version's


def is_metrics(path: Path) -> bool:
    """Whether a run wrote the file. Its last line may be cut off."""
    lines = lines_of(path)
    whole = lines if len(lines) == 1 else lines[:-1]
    return path.is_file() and all(map(_is_line, whole))


def has_updates(path: Path) -> bool:
    """Whether there are lines of updates: a run that stopped in its first one lost nothing."""
    return any(0 < _step_of(line) < float("inf") for line in lines_of(path))


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _is_line(line: str) -> bool:
    found = _read(line)
    return any(keys <= found.keys() for keys in (JUDGED, TRAINED))


def _step_of(line: str) -> float:
    step = _read(line).get("step")
    return step if isinstance(step, int) else float("inf")  # half a line, cut off by a crash


def _read(line: str) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
