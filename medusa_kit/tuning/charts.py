"""Charts, where matplotlib is there to draw them."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from medusa_kit import console


def draw(path: Path, plot: Callable[[Any, Path], None], place: Path | None = None) -> None:
    """Draw a chart. `plot` gets the module that draws (plots.py), and the path. `place`: where the
    chart comes to be, for the note."""
    try:
        plots = import_module("medusa_kit.tuning.plots")
    except ImportError:
        console.note("no chart: matplotlib is not installed ({extra('plot')})")
        return
    plot(plots, path)
    console.note(f"wrote {place or path}")
