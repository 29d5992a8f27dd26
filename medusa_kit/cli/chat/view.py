"""An answer as it appears: its text on stdout. On a terminal lines are broken between words, each
token is tinted by who drafted it, and a live figure stands after the cursor (stderr)."""

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import typer

from medusa_kit import console
from medusa_kit.cli.chat import notes
from medusa_kit.cli.chat.wrap import Styled, WordWrap
from medusa_kit.console import BACK, ERASE, SAVE
from medusa_kit.loops import loop_start

SLACK = 4  # columns left free, in case the terminal counts a character's width differently
BASE, HEADS, TEXT = "the model itself", "the heads", "earlier text"
DRAFT_MODEL = "the draft model"
TINTS = {BASE: None, HEADS: "green", TEXT: "cyan", DRAFT_MODEL: "magenta"}
KINDS = {None: BASE, "medusa": HEADS, "draft-model": DRAFT_MODEL}  # every other drafter reads text
# A model's control characters would move the cursor, and its tabs stay.
HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
HARMLESS[ord("\r")] = ""


def on_terminal() -> bool:
    """Whether answers go to a terminal; elsewhere they are exactly the text."""
    return sys.stdout.isatty()


def can_tint() -> bool:
    return on_terminal() and not (console.out.no_color or console.out.is_dumb_terminal)


def kind_of(guessed_by: str | None) -> str:
    return KINDS.get(guessed_by, TEXT)


def say_legend(kinds: Iterable[str]) -> None:
    """What the tints mean, for tokens of these kinds."""
    wrap = WordWrap(console.err.width)
    parts: list[Styled] = [("colours of drafted tokens: ", None)]
    for kind in kinds:
        parts += [(f"by {kind}" if kind != TEXT else f"from {kind}", TINTS[kind]), (", ", None)]
    for text, tint in [*parts[:-1], ("; /accepted switches them off", None)]:
        _echo(wrap.push(text, tint), err=True)
    _echo([*wrap.finish(), ("\n", None)], err=True)


class AnswerView:
    """Shows one answer. Whatever ends it, nothing but the answer stays on the screen."""

    def __init__(self, tinted: bool) -> None:
        self.tinted = tinted and can_tint()
        self._live = console.err.is_terminal and not (
            console.err.is_dumb_terminal or console.err.legacy_windows
        )
        self._wrap = WordWrap(console.out.width) if on_terminal() else None
        self._status_in: tuple[int, int] | None = None  # a terminal of this size shows a status

    def __enter__(self) -> "AnswerView":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def show(self, piece: Any, tokens_per_second: float) -> None:
        """A piece of `Engine.stream`, and the speed so far."""
        self._clear()
        if self._wrap is not None:
            self._wrap.resize(console.out.width)
        for text, guessed_by in piece.spans:
            self._put(text, TINTS[kind_of(guessed_by)] if self.tinted else None)
        self.status(f"{speed(tokens_per_second)} tokens/s")

    def again(self, words: str) -> None:
        """Other words in place of those that stand after the cursor."""
        self._clear()
        self.status(words)

    def finish(self, more: str = "") -> None:
        """What has been held back, and `more` behind it."""
        self._clear()
        if more:
            self._put(more, None)
        if self._wrap is not None:
            _echo(self._wrap.finish())

    def status(self, words: str) -> None:
        """Words after the cursor, until the next piece; none where the line has no room. What the
        terminal itself shows of a Ctrl-C goes with them.

        The cursor goes back before them at once: a terminal that is resized moves it along with
        the text, but not the place that it was told to save."""
        shown, column = f" {words}", 0 if self._wrap is None else self._wrap.column
        room = console.err.width - column - SLACK
        if self._live and room >= 0:
            dim = shown if console.err.no_color else typer.style(shown, dim=True)
            _write(SAVE + (dim if len(shown) <= room else "") + BACK)
            self._status_in = console.err.size

    def _put(self, text: str, tint: str | None) -> None:
        if self._wrap is None:
            typer.echo(text, nl=False, color=True)  # else its escape sequences are left out
        else:
            _echo(self._wrap.push(text.translate(HARMLESS), tint))

    def _clear(self) -> None:
        if self._status_in is not None:
            _write((BACK if console.err.size == self._status_in else "") + ERASE)
            self._status_in = None


def _echo(parts: Iterable[Styled], err: bool = False) -> None:
    for text, tint in parts:
        typer.echo(typer.style(text, fg=tint) if tint else text, nl=False, err=err)


def _write(text: str) -> None:
    console.err.file.write(text)
    console.err.file.flush()


def origins(guessed: Mapping[str | None, int]) -> str:
    """How many tokens came from whom. `guessed`: as of `Streaming`."""
    counts: Counter[str] = Counter()
    for guessed_by, tokens in guessed.items():
        counts[kind_of(guessed_by)] += tokens
    return "tokens from " + ", ".join(f"{kind}: {counts[kind]}" for kind in TINTS if counts[kind])


def two_columns(rows: Mapping[str, str], width: int) -> str:
    """Names and what they are; lines break between words. On a narrow terminal the second column
    goes on below the first."""
    indent = max(map(len, rows)) + 3
    indent = indent if width >= 2 * indent else 2
    return "\n".join(
        textwrap.fill(text, width, initial_indent=f"{name}  ".ljust(indent),
                      subsequent_indent=" " * indent)
        for name, text in rows.items()
    )  # fmt: skip


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.{0 if tokens_per_second >= 20 else 1}f}"


def closing(result: Any, max_new_tokens: int, verbose: bool = False) -> str:
    """How an answer came about, in one line. `verbose`: with the prompt's part in it."""
    stats, parts = result.stats, []
    if stats.new_tokens:
        tokens = counted(stats.new_tokens, "token")
        parts.append(
            f"{tokens} in {stats.seconds:.1f} s, {speed(stats.tokens_per_second)} tokens/s"
        )
        if stats.drafter != "none" and stats.num_steps:
            parts.append(f"{stats.acceptance_length:.1f} tokens per step")
    if (start := loop_start(result.token_ids)) is not None:
        parts.append(
            f"from token {start + 1} on it is a loop, one span over and over: "
            "--repetition-penalty 1.1 may help"
        )
    if verbose and stats.new_tokens:
        cached = f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens cached"
        parts.append(f"the first after {stats.first_token_seconds:.2f} s, {cached}")
    if result.finish_reason == "cancelled":
        parts.append("stopped by Ctrl-C")
    elif result.finish_reason != "stop":
        full = stats.new_tokens < max_new_tokens
        limit = f"at the limit of {counted(max_new_tokens, 'token')} (-n)"
        parts.append(f"stopped {'where the context is full' if full else limit}")
    return "; ".join(parts or ["an empty answer"]) + notes.rule_note(stats)
