"""What a person sees: data on stdout; progress, notes and warnings on stderr.

Colour switches itself off when the stream is no terminal or NO_COLOR is set (rich does both).
"""

import math
import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner
from rich.text import Text

from medusa_kit.tables import table as table

SAVE, BACK, ERASE = "\x1b7", "\x1b8", "\x1b[J"  # the cursor's place; back to it; what follows it
ONE_LINE, LINES = "\x1b[?7l", "\x1b[?7h"  # what is too long is cut off; goes on in the next line
WIDTH_OF_LOGS = 100  # columns where stdout is no terminal and COLUMNS is not set
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_OF_LOGS)


class _Stderr(Console):
    """A full disk under a log, or a closed pipe, does not fail the work that is told of: rich would
    raise in the thread that says something, or end it."""

    @property  # type: ignore[misc]
    def file(self) -> Any:
        return _Lossy(super().file)


class _Lossy:
    """A stream whose writes may be lost."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


err = _Stderr(stderr=True)
RATE_SECONDS = 60.0  # of the latest work, by which the rest is judged
LOG_SECONDS = 20.0  # between lines of progress where stderr is no terminal


def is_main() -> bool:
    """Whether this process prints: of several that train together, only the first does."""
    return os.environ.get("RANK", "0") == "0"


def note(message: str) -> None:
    """A line about what is going on (stderr)."""
    if is_main():
        _say(message, "dim")


def warn(message: str) -> None:
    """A line about something the user should know (stderr)."""
    if is_main():
        _say(f"warning: {message}", "yellow")


_details = False


@contextmanager
def details(shown: bool) -> Iterator[None]:
    """Whether `detail` says something meanwhile."""
    global _details
    before, _details = _details, shown
    try:
        yield
    finally:
        _details = before


def shows_details() -> bool:
    return _details


def detail(message: str) -> None:
    """A line for those who asked for more (stderr)."""
    if _details:
        note(message)


def _say(message: str, style: str) -> None:
    if err.is_terminal:  # which would break lines within words
        wrapper = textwrap.TextWrapper(
            max(err.width, 1), break_long_words=False, break_on_hyphens=False,
            replace_whitespace=False,
        )  # fmt: skip
        message = "\n".join(wrapper.fill(line) for line in message.split("\n"))
    with nullcontext() if _stages is None else _stages.aside():
        err.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


def number(value: float | None, form: str) -> str:
    """A number in this format; a dash where there is none, such as a share of nothing."""
    return "–" if value is None or math.isnan(value) else format(value, form)


def times(ratio: float | None) -> str:
    """A ratio of speeds; a dash where nothing was measured."""
    return "–" if ratio is None else f"{ratio:.2f} ×"


def counted(count: int, one: str) -> str:
    """A number of things: 1 prompt, 2 prompts."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same table for a file in Markdown, without a title."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _rate(per_second: float, unit: str) -> str:
    """Units a second, or seconds a unit where that says more."""
    if per_second >= 1:
        return f"{per_second:,.1f} {unit}/s"
    return f"{1 / per_second:,.1f} s each" if per_second else f"– {unit}/s"


class _Pace:
    """The rate of the latest work. What is done at once at the end took all the time before it."""

    def __init__(self, done: float) -> None:
        # (when, how much was done): what was there before, and what is set up first, is no rate.
        self._latest = deque([(time.monotonic(), float(done))])

    @property
    def done(self) -> float:
        return self._latest[-1][1]

    def advance(self, amount: float) -> None:
        now = time.monotonic()
        self._latest.append((now, self.done + amount))
        while now - self._latest[1][0] > RATE_SECONDS:  # the first is when the rest began
            self._latest.popleft()

    @property
    def per_second(self) -> float:
        (began, before), (now, done) = self._latest[0], self._latest[-1]
        return (done - before) / max(now - began, 1e-9)


class _RateColumn(ProgressColumn):
    """Units a second, as the bar says."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["rate"], style="progress.data.speed")


class ProgressBar:
    """One line of progress. `advance(amount, note)`; the note stands after the rate."""

    def __init__(self, progress: Progress, task_id: TaskID, unit: str, done: int) -> None:
        self._progress = progress
        self._task_id = task_id
        self._unit, self._pace = unit, _Pace(done)

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self._pace.advance(amount)
        fields = {} if note is None else {"note": note}
        fields["rate"] = _rate(self._pace.per_second, self._unit)
        self._progress.update(self._task_id, advance=amount, **fields)  # type: ignore[arg-type]

    def expect(self, total: float) -> None:
        """The work turned out to be this much."""
        self._progress.update(self._task_id, total=total)


class SilentBar(ProgressBar):
    """For processes that do not speak."""

    def __init__(self) -> None:
        pass

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        pass

    def expect(self, total: float) -> None:
        pass


class LogBar(ProgressBar):
    """The same for a log file: a line now and then instead of one that moves."""

    def __init__(
        self, description: str, total: float | None, unit: str, done: int, brief: bool = False
    ) -> None:
        self._brief = brief  # nothing is said of work that ends before the first line
        self._head, self._unit, self._total = description, unit, total
        self._pace = _Pace(done)
        self._said = time.monotonic()
        self._note = ""

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self._pace.advance(amount)
        self._note = self._note if note is None else note
        now = time.monotonic()
        ended = self._pace.done == self._total and not self._brief
        if now - self._said >= LOG_SECONDS or ended:
            self._said, self._brief = now, False
            self._say()

    def expect(self, total: float) -> None:
        self._total = total

    def _say(self) -> None:
        rate, done = self._pace.per_second, self._pace.done
        line = f"{self._head}: {done:,.0f}"
        if self._total is not None:
            line += f" of {self._total:,.0f}"
            line += f", {(self._total - done) / rate:,.0f} s left" if rate else ""
        note(f"{line}, {_rate(rate, self._unit)} {self._note}".rstrip())


@contextmanager
def progress(
    description: str, total: float | None, unit: str = "it", done: int = 0, brief: bool = False
) -> Iterator[ProgressBar]:
    """Progress with rate and time left on stderr; `done` is what an earlier run finished. `brief`:
    nothing is left of it at the end, and a log has nothing of work that is done soon."""
    if not is_main():
        yield SilentBar()
        return
    if not err.is_terminal:
        yield LogBar(description, total, unit, done, brief)
        return
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=err,
        transient=brief,
    )
    with _without_spinner(), bar:
        task_id = bar.add_task(description, total=total, completed=done, rate="", note="")
        yield ProgressBar(bar, task_id, unit, done)


class _Stages:
    """A spinner with what is being done. It stands as stderr, so that a bar which another library
    draws there is not drawn over: the spinner makes way, and comes back with the next stage."""

    def __init__(self, stderr: Any) -> None:
        self.rich_proxied_file = stderr  # where rich itself writes
        self._live: Live | None = None
        self.held = False  # since a bar is drawn in its place

    def show(self, doing: str) -> None:
        self.hide()
        if self.held:
            return
        spinner = Spinner("dots", Text(f"{doing} …", style="dim"), style="dim")
        self._live = Live(
            spinner,
            console=err,
            refresh_per_second=10,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)  # seen at once

    def hide(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While a line is written above it."""
        yield  # rich writes above a spinner by itself

    def write(self, text: str) -> int:
        self.hide()
        return int(self.rich_proxied_file.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class _BesidePrompt(_Stages):
    """The same without a spinner, behind the sign of a prompt at which a person may type already.
    The terminal shows what is typed and keeps it until somebody reads it."""

    def __init__(self, stderr: Any, prompt: str) -> None:
        super().__init__(stderr)
        self._prompt, self._there, self._doing = prompt, False, ""

    def show(self, doing: str) -> None:
        if self.held:
            return
        before = "" if self._there else self._prompt
        self._there, self._doing = True, doing  # before a Ctrl-C, so that it is erased
        dim, plain = ("", "") if err.no_color else ("\x1b[2m", "\x1b[0m")
        # Behind what has been typed by now, and never broken into another line.
        said = f"{SAVE}{ERASE}{ONE_LINE} {dim}{doing} …{plain}{LINES}{BACK}"
        self.rich_proxied_file.write(before + said)
        self.rich_proxied_file.flush()

    @contextmanager
    def aside(self) -> Iterator[None]:
        there = self._there
        self.hide()
        yield
        if there:
            self.show(self._doing)

    def hide(self) -> None:
        if self._there:
            self.rich_proxied_file.write(f"\r{ERASE}")
            self.rich_proxied_file.flush()
        self._there = False


_stages: _Stages | None = None


@contextmanager
def stages(first: str, prompt: str = "") -> Iterator[None]:
    """Show what is being done while something loads, where stderr is a terminal: `first`, then
    what `stage` is given. Nothing of it is left at the end. `prompt`: the sign of a prompt that is
    shown meanwhile, where a person can type."""
    global _stages
    shown = err.is_terminal and err.is_interactive and is_main()
    typing = prompt and sys.stdin.isatty() and not (err.is_dumb_terminal or err.legacy_windows)
    if not shown or _stages is not None:
        yield
        return
    stderr = sys.stderr
    sys.stderr = _stages = _BesidePrompt(stderr, prompt) if typing else _Stages(stderr)
    try:
        stage(first)
        yield
    finally:
        _stages.hide()
        sys.stderr, _stages = stderr, None


@contextmanager
def _without_spinner() -> Iterator[None]:
    """Two moving lines at a time would erase each other."""
    shown = _stages
    if shown is None or shown.held:
        yield
        return
    shown.hide()
    shown.held = True
    try:
        yield
    finally:
        shown.held = False


def stage(doing: str) -> None:
    """What is being done from now on, for whoever waits under `stages`; else nothing."""
    if _stages is not None:
        _stages.show(doing)
