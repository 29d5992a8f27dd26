"""Tables for people: as a table where the terminal has room for all figures, else row by row."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

# Characters of a cell that stays on one line, such as a figure and its unit, and of other words,
# which may be cut: paths are long; of a row's name that stays on one line.
FIGURE, WORD, LABEL = 12, 14, 20


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> "_Figures":
    """First column left, the others right; cells by str()."""
    return _Figures(title, columns, [[str(cell) for cell in row] for row in rows])


class _Figures(Table):
    def __init__(self, title: str, columns: Sequence[str], rows: list[list[str]]) -> None:
        super().__init__(title=title, title_justify="left", title_style="bold")
        self._title, self._names, self._lines = title, columns, rows
        self._least, self._whole = list[int](), list[int]()  # characters of each column
        for index, name in enumerate(columns):
            cells = [row[index] for row in rows if index < len(row)]
            whole = max(map(_whole, [name, *cells]))
            least = max([_word(name), *map(_least, cells)])
            self._least.append(least if index else max(least, min(LABEL, whole)))
            self._whole.append(whole)
            self.add_column(name, justify="right" if index else "left", overflow="fold")
        for row in rows:
            self.add_row(*map(Text, row))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Any:
        frame = 1 + 3 * len(self._names)  # lines, and two spaces a column
        room = options.max_width - frame - sum(self._least)
        if room < 0:
            yield from self._row_by_row()
            return
        # rich would cut figures as well as words. Columns that need least get it first.
        needs = [whole - least for whole, least in zip(self._whole, self._least, strict=True)]
        for index in sorted(range(len(needs)), key=needs.__getitem__):
            more = max(0, min(needs[index], room))
            self.columns[index].width, room = self._least[index] + more, room - more
        yield from super().__rich_console__(console, options)

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


def _word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _least(cell: str) -> int:
    """How narrow the cell may get."""
    if (whole := _whole(cell)) <= FIGURE:
        return whole
    return min(WORD, _word(cell))
