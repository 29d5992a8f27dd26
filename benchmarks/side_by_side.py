"""Cases that two programs measure in turn: rounds, ratios, a table and a chart of them.

A case gives one figure of each program in every round. Who is first changes from round to round and
from case to case. Ratios are ours over theirs within a round: above 1 in tokens a second, and below
1 in seconds and bytes, ours is the better.
"""

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rounds import rotated, spread

from medusa_kit import console
from medusa_kit.errors import MedusaKitError

OURS, THEIRS = "medusa-kit", "llama.cpp"
COLOURS = {"transformers": "#9aa0a6", THEIRS: "#c58f4a", OURS: "#2f7d6b"}
RATE, MILLISECONDS, SECONDS, MEGABYTES = "tokens/s", "ms", "s", "MB"
NAME_WIDTH = 12  # characters in a line under a bar
FAILURES = (RuntimeError, ValueError, OSError, MedusaKitError)


@dataclass(frozen=True)
class Case:
    """What is measured (`part` and `name`), in which unit, and by whom."""

    part: str
    name: str
    unit: str
    measure: Mapping[str, Callable[[], float]]  # OURS and THEIRS


@dataclass
class Measured:
    """A case's figures, one a round of each program; `not_run`: why one has none."""

    part: str
    name: str
    unit: str
    figures: dict[str, list[float]] = field(default_factory=lambda: {OURS: [], THEIRS: []})
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, sorted."""
        pairs = zip(self.figures[OURS], self.figures[THEIRS], strict=False)
        return sorted(ours / theirs for ours, theirs in pairs)

    def median(self, who: str) -> float | None:
        return statistics.median(self.figures[who]) if self.figures[who] else None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        ratios = self.ratios
        return {
            "part": self.part,
            "name": self.name,
            "unit": self.unit,
            "rounds": self.figures,
            "median": {who: self.median(who) for who in (OURS, THEIRS)},
            "ratio": {"median": statistics.median(ratios), "least": ratios[0],
                      "greatest": ratios[-1]} if ratios else None,
            "not_run": self.not_run,
        }  # fmt: skip

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Measured":
        """From such a record."""
        named = (record["part"], record["name"], record["unit"])
        return cls(*named, record["rounds"], record["not_run"])


def run_rounds(
    cases: Sequence[Case], rounds: int, keep: Callable[[list[Measured]], None]
) -> list[Measured]:
    """Every case in every round; `keep` gets the figures after each round. Who fails at a case is
    left out of it from then on."""
    found = [Measured(case.part, case.name, case.unit) for case in cases]
    for number in range(rounds):
        for place, (case, measured) in enumerate(zip(cases, found, strict=True)):
            console.note(f"round {number + 1} of {rounds}: {case.part}, {case.name}")
            for who in rotated((OURS, THEIRS), number + place):
                _measure(case, measured, who)
        keep(found)
    return found


def _measure(case: Case, measured: Measured, who: str) -> None:
    if who in measured.not_run:
        return
    try:
        measured.figures[who].append(case.measure[who]())
    except FAILURES as error:
        measured.not_run[who] = str(error)
        measured.figures[who].clear()
        console.warn(f"{case.part}, {case.name}: {who}: {error}")


COLUMNS = ("what", "unit", OURS, THEIRS, "ours / theirs")


def rows(found: Iterable[Measured]) -> list[list[str]]:
    return [
        [f"{one.part}: {one.name}", one.unit, *(_shown(one.median(who)) for who in (OURS, THEIRS)),
         spread(one.ratios)]
        for one in found
    ]  # fmt: skip


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def chart(found: Sequence[Measured], title: str, path: Path) -> None:
    """Medians by part and unit, a panel each; a case without figures is left out."""
    from matplotlib import pyplot

    panels: dict[tuple[str, str], list[Measured]] = {}
    for one in found:
        if any(one.figures.values()):
            panels.setdefault((one.part, one.unit), []).append(one)
    if not panels:
        return
    set_up_fonts(pyplot)
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(2.6 * len(panels), 3.2), squeeze=False, layout="constrained"
    )
    for axes, ((part, unit), cases) in zip(all_axes[0], panels.items(), strict=True):
        _panel(axes, f"{part}, {unit}", cases)
    handles, names = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    save(figure, path)
    pyplot.close(figure)


def _panel(axes: Any, title: str, cases: Sequence[Measured]) -> None:
    for offset, who in ((-0.2, OURS), (0.2, THEIRS)):
        heights = [one.median(who) or 0.0 for one in cases]
        places = [place + offset for place in range(len(cases))]
        axes.bar(places, heights, width=0.38, color=COLOURS[who], label=who)
        for place, height in zip(places, heights, strict=True):
            axes.text(place, height, _shown(height or None), ha="center", va="bottom", fontsize=7)
    axes.set_title(title, fontsize=9)
    named = [textwrap.fill(one.name, NAME_WIDTH) for one in cases]
    axes.set_xticks(range(len(cases)), named, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def set_up_fonts(pyplot: Any) -> None:
    """Text as outlines, and no random names: the same figures give the same file."""
    pyplot.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "medusa-kit", "font.size": 11})


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Date": None})
