"""Acceptance length against updates, from the training run's own evaluations."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from medusa_kit import console
from medusa_kit.files import parse_json

BAR = 40  # columns of the longest bar


class Point(NamedTuple):
    updates: int
    acceptance_length: float


def read_curve(metrics: Path) -> list[Point]:
    """The evaluations in a run's metrics.jsonl, in order; the first is of untrained heads."""
    lengths: dict[int, float] = {}
    for line in metrics.read_text().splitlines():
        row = parse_json(line)
        length = row.get("held_out", {}).get("acceptance_length")
        if length is not None:
            lengths[row["step"]] = length
    return [Point(*item) for item in sorted(lengths.items())]


def lines(points: Sequence[Point]) -> list[str]:
    """A line with a bar for each point; bars begin at 1, plain decoding's length."""
    max_gain = max(point.acceptance_length for point in points) - 1
    return [
        f"  {updates:>6,} updates  {length:.2f}  "
        + "█" * (round(BAR * (length - 1) / max_gain) if max_gain > 0 else 0)
        for updates, length in points
    ]


def plot(points: Sequence[Point], path: Path) -> bool:
    """The curve as a PNG; whether matplotlib was there to draw it."""
    try:
        from medusa_kit.tuning.plots import plot_acceptance
    except ImportError:
        console.note("no plot: matplotlib is not installed ({extra('plot')})")
        return False
    plot_acceptance([p.updates for p in points], [p.acceptance_length for p in points], path)
    return True
