"""An answer as it appears: text on stdout, on a terminal with a live figure after the cursor
(stderr) and, if asked for, each token tinted by who guessed it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import typer
from rich.cells import cell_len

from medusa_kit import console
from medusa_kit.cli import options

SAVE, RESTORE = "\x1b7", "\x1b8\x1b[J"  # the cursor; back to it, and what follows it is erased
SLACK = 4  # columns left free, in case the terminal counts a character's width differently
BASE, HEADS, TEXT, DRAFT_MODEL = "the base model alone", "heads", "text", "the draft model"
TINTS = {BASE: None, HEADS: "green", TEXT: "cyan", DRAFT_MODEL: "magenta"}
KINDS = {None: BASE, "medusa": HEADS, "draft-model": DRAFT_MODEL}  # every other drafter reads text


def can_tint() -> bool:
    return console.out.is_terminal and not console.out.no_color


def kind_of(guessed_by: str | None) -> str:
    return KINDS.get(guessed_by, TEXT)


def legend(kinds: Iterable[str]) -> str:
    """What the tints mean."""
    return "tokens from " + ", ".join(typer.style(kind, fg=TINTS[kind]) for kind in kinds)


class AnswerView:
    """Shows one answer. Whatever ends it, nothing but the answer stays on the screen."""

    def __init__(self, tinted: bool) -> None:
        self.tinted = tinted and can_tint()
        self._live = console.err.is_terminal and not (
            console.err.is_dumb_terminal or console.err.legacy_windows
        )
        self._column = 0
        self._status_shown = False

    def __enter__(self) -> "AnswerView":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def show(self, piece: Any, tokens_per_second: float) -> None:
        """A piece of `Engine.stream`, and the speed so far."""
        self.clear()
        for text, guessed_by in piece.spans:
            tint = TINTS[kind_of(guessed_by)] if self.tinted else None
            typer.echo(typer.style(text, fg=tint) if tint else text, nl=False)
        if console.out.is_terminal:
            self._column = column_after(self._column, piece, console.err.width)
        self.status(f"{speed(tokens_per_second)} tokens/s")

    def status(self, words: str) -> None:
        """Words after the cursor, until the next piece; none where the line has no room."""
        shown = f" {words}"
        if self._live and self._column + len(shown) + SLACK <= console.err.width:
            dim = shown if console.err.no_color else typer.style(shown, dim=True)
            _write(SAVE + dim)
            self._status_shown = True

    def clear(self) -> None:
        if self._status_shown:
            _write(RESTORE)
            self._status_shown = False


def _write(text: str) -> None:
    console.err.file.write(text)
    console.err.file.flush()


def column_after(column: int, text: str, width: int) -> int:
    """Where the cursor is once `text` has been written from `column` on."""
    for character in text:
        if character in "\r\n":
            column = 0
        elif character == "\t":
            column = min(column + 8 - column % 8, width - 1)
        else:
            cells = cell_len(character)
            column = cells if column + cells > width else column + cells
    return column


def origins(guessed: Mapping[str | None, int]) -> str:
    """How many tokens came from whom. `guessed`: as of `Streaming`."""
    counts: Counter[str] = Counter()
    for guessed_by, tokens in guessed.items():
        counts[kind_of(guessed_by)] += tokens
    return "tokens from " + ", ".join(f"{kind}: {counts[kind]}" for kind in TINTS if counts[kind])


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.{0 if tokens_per_second >= 20 else 1}f}"


def closing(result: Any, max_new_tokens: int) -> str:
    """How an answer came about, in one line."""
    stats, parts = result.stats, []
    if stats.new_tokens:
        tokens = counted(stats.new_tokens, "token")
        rate = speed(stats.tokens_per_second)
        parts.append(f"{tokens} in {stats.seconds:.1f} s ({rate} tokens/s)")
        if stats.drafter != "none" and stats.num_steps:
            parts.append(f"{stats.acceptance_length:.1f} tokens per step")
    if stats.cached_tokens:
        read = f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens read before"
        parts.append(f"the first after {stats.first_token_seconds:.2f} s, {read}")
    reasons = {"stop": "at the end of the answer", "cancelled": "by Ctrl-C"}
    full = stats.new_tokens < max_new_tokens
    limit = f"at the limit of {counted(max_new_tokens, 'token')}"
    limit = "where the model's context is full" if full else limit
    parts.append(f"stopped {reasons.get(result.finish_reason, limit)}")
    return "; ".join(parts) + options.rule_note(stats)
