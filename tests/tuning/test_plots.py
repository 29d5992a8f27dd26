"""The chart of a bench: a bar for each method, and the depths of those that draft."""

from pathlib import Path
from typing import Any

import pytest

plots = pytest.importorskip("medusa_kit.tuning.plots", reason="matplotlib is not installed")

RATES = {"generate": 10.0, "one node": 12.0, "heads": 20.0}
DEPTHS: dict[str, list[float]] = {"generate": [], "one node": [], "heads": [0.5, 0.25]}


def drawn(monkeypatch: pytest.MonkeyPatch, depths: dict[str, list[float]]) -> Any:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    plots.plot_bench(RATES, depths, "title", Path("unused.png"))
    plots.plt.close("all")
    return figures[0].axes


def test_bars_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    (axes,) = drawn(monkeypatch, {name: [] for name in RATES})
    assert [bar.get_width() for bar in axes.patches] == [10.0, 12.0, 20.0]
    labels = [text.get_text() for text in axes.texts]
    assert labels == ["10.0 (1.00 ×)", "12.0 (1.20 ×)", "20.0 (2.00 ×)"]


def test_depths_of_those_that_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    _, axes = drawn(monkeypatch, DEPTHS)
    (line,) = axes.lines
    assert (line.get_label(), list(line.get_xdata())) == ("heads", [1, 2])
    assert list(line.get_ydata()) == [0.5, 0.25]
