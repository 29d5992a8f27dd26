"""What a person sees: data on stdout; progress, notes and warnings on stderr.

Colour switches itself off when the stream is no terminal or NO_COLOR is set (rich does both).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

out = Console()
err = Console(stderr=True)


def note(message: str) -> None:
    """A line about what is going on (stderr)."""
    err.print(message, style="dim", markup=False, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """A line about something the user should know (stderr)."""
    err.print(f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table ready for `out.print`: first column left, the others right; cells by str()."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        result.add_row(*(Text(str(cell)) for cell in row))
    return result


class _RateColumn(ProgressColumn):
    """Units a second; `unit` comes with the task."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit = task.fields.get("unit", "it")
        return Text(
            f"{speed:,.1f} {unit}/s" if speed else f"– {unit}/s", style="progress.data.speed"
        )


class ProgressBar:
    """One line of progress. `advance(amount, note)`; the note stands behind the rate."""

    def __init__(self, progress: Progress, task_id: int) -> None:
        self._progress = progress
        self._task_id = task_id

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        fields = {} if note is None else {"note": note}
        self._progress.update(self._task_id, advance=amount, **fields)  # type: ignore[arg-type]


@contextmanager
def progress(
    description: str, total: float | None, unit: str = "it", done: int = 0
) -> Iterator[ProgressBar]:
    """A progress bar with rate and time left on stderr; `done` is what an earlier run finished."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=err,
    )
    with bar:
        task_id = bar.add_task(description, total=total, completed=done, unit=unit, note="")
        yield ProgressBar(bar, task_id)
