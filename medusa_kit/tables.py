"""Tables for people: as a table where the terminal has room for all figures, else row by row."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

# Characters of a cell that stays on one line, such as a figure and its unit, and of other words,
# which may be cut: paths are long.
FIGURE, WORD = 12, 14


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> "_Figures":
    """First column left, the others right; cells by str()."""
    return _Figures(title, columns, [[str(cell) for cell in row] for row in rows])


class _Figures(Table):
    def __init__(self, title: str, columns: Sequence[str], rows: list[list[str]]) -> None:
        super().__init__(title=title, title_justify="left", title_style="bold")
        self._title, self._names, self._lines = title, columns, rows
        self._room = 1
        for index, name in enumerate(columns):
            cells = [row[index] for row in rows if index < len(row)]
            least = max(map(_least if index else _whole, [name, *cells]), default=0)
            self._room += least + 3  # a frame and two spaces
            self.add_column(
                name, justify="right" if index else "left", no_wrap=not index, min_width=least,
                overflow="fold",
            )  # fmt: skip
        for row in rows:
            self.add_row(*map(Text, row))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Any:
        if self._room <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self._row_by_row()

    def _row_by_row(self) -> Iterable[Text]:
        names = [" ".join(name.split()) for name in self._names]
        if self._title:
            yield Text(self._title, "bold")
        for first, *others in self._lines:
            yield Text(" ".join(first.split()))
            for name, cell in zip(names[1:], others, strict=False):
                yield Text(f"  {name}: {' '.join(cell.split())}")


def _whole(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _least(cell: str) -> int:
    """How narrow the cell may get."""
    if (whole := _whole(cell)) <= FIGURE:
        return whole
    return min(WORD, max(map(len, cell.split()), default=0))
