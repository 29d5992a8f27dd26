"""A terminal's screen over time as an animated SVG: CSS alone, no script, no font of its own.

It repeats for ever. Where animations are off, the last screen stands there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT, SIZE = 8.4, 19, 14  # of a character, in pixels; and the font's
PADDING, BAR = 14, 30
COLOURS = {"default": "#d7dae0", "brightblack": "#8a919e", "green": "#7fd88f", "cyan": "#62c8e6",
           "magenta": "#e08fd8", "brown": "#e5c07b", "red": "#f07178"}  # fmt: skip
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


@dataclass(frozen=True)
class Cell:
    """A character and the seconds for which it stood; `died` None: until the end."""

    row: int
    column: int
    text: str
    style: str
    born: float
    died: float | None

    def moved(self, seconds: float) -> "Cell":
        died = None if self.died is None else self.died + seconds
        return replace(self, born=max(self.born + seconds, 0.0), died=died)

    @property
    def life(self) -> tuple[float, float | None]:
        return round(self.born, 2), None if self.died is None else round(self.died, 2)


@dataclass
class Run:
    """Neighbours of one style that came and went together."""

    first: Cell
    text: str

    def takes(self, cell: Cell, gap: int) -> bool:
        alike = (cell.row, cell.style, cell.life) == (
            self.first.row,
            self.first.style,
            self.first.life,
        )
        return alike and cell.column == self.first.column + len(self.text) + gap


def runs_of(cells: Sequence[Cell]) -> list[Run]:
    """Cells in runs; a single space between two words does not part them."""
    runs: list[Run] = []
    alive: dict[object, Run] = {}  # by row, style and life: the run that goes on
    for cell in sorted(cells, key=lambda cell: (cell.row, cell.column, cell.born)):
        key = cell.row, cell.style, cell.life
        run = alive.get(key)
        gap = next((gap for gap in (0, 1) if run is not None and run.takes(cell, gap)), None)
        if run is None or gap is None:
            run = alive[key] = Run(cell, cell.text)
            runs.append(run)
        else:
            run.text += " " * gap + cell.text
    return runs


def animated(cells: Sequence[Cell], columns: int, seconds: float, title: str) -> str:
    """The SVG. `seconds` until it begins again."""
    lives = sorted({cell.life for cell in cells}, key=lambda life: (life[0], life[1] or seconds))
    names = {life: f"a{number}" for number, life in enumerate(lives)}
    rows = 1 + max(cell.row for cell in cells)
    width, height = 2 * PADDING + columns * WIDTH, 2 * PADDING + BAR + rows * HEIGHT
    rules = "".join(_rule(names[life], life, seconds) for life in lives)
    tints = "".join(f".{name}{{fill:{colour}}}" for name, colour in COLOURS.items())
    dots = "".join(
        f'<circle cx="{PADDING + 6 + 18 * place}" cy="16" r="5.5" fill="{colour}"/>'
        for place, colour in enumerate(("#f07178", "#e5c07b", "#7fd88f"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{escape(title)}" '
        'xml:space="preserve">'
        f"<style>text{{font:{SIZE}px {FONT}}}{tints}.bar{{fill:#8a919e;text-anchor:middle}}{rules}"
        "@media (prefers-reduced-motion:reduce){text{animation:none!important}}</style>"
        f'<rect width="100%" height="100%" rx="9" fill="#1d2027"/>{dots}'
        f'<text class="bar" x="{width / 2:.0f}" y="21">{escape(title)}</text>'
        f"{''.join(_text(run, names[run.first.life]) for run in runs_of(cells))}</svg>\n"
    )


def _rule(name: str, life: tuple[float, float | None], seconds: float) -> str:
    born, died = life
    frames = "" if born <= 0 else "0%{opacity:0}"
    frames += f"{100 * born / seconds:.4g}%{{opacity:1}}"
    if died is not None:
        frames += f"{100 * died / seconds:.4g}%{{opacity:0}}"
    hidden = "opacity:0;" if died is not None else ""
    return (
        f".{name}{{{hidden}animation:{name} {seconds:.2f}s step-end infinite}}"
        f"@keyframes {name}{{{frames}}}"
    )


def _text(run: Run, name: str) -> str:
    cell = run.first
    x, y = PADDING + cell.column * WIDTH, PADDING + BAR + cell.row * HEIGHT + SIZE
    length = f' textLength="{len(run.text) * WIDTH:.4g}"' if len(run.text) > 1 else ""
    style = cell.style if cell.style in COLOURS else "default"
    return f'<text class="{style} {name}" x="{x:.5g}" y="{y}"{length}>{escape(run.text)}</text>'
