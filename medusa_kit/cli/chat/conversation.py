"""The conversation, and the commands that a person can type in it."""

import io
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from medusa_kit import console, ctrl_c
from medusa_kit.cli.chat import interrupt, notes, view
from medusa_kit.cli.chat.drawing import drawing
from medusa_kit.cli.chat.keys import keys_unseen
from medusa_kit.errors import ContextLengthError, MedusaKitError, UsageError
from medusa_kit.loops import loop_start

if TYPE_CHECKING:
    from medusa_kit.infer.details import VerifiedTree

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/system TEXT": "start over with this system message",
    "/compare": "answer the last prompt again with plain decoding, and say how much faster it was "
    "with drafting, and how much was copied",
    "/accepted": "colours of drafted tokens: off, and on again",
    "/tree": "draw the draft tokens that the last step verified",
    "/exit, /quit": "leave (so does Ctrl-D)",
    "Ctrl-C": "stop an answer and keep what there is of it",
}
PROMPT = "› "
WORDS = ("help", "exit", "quit")  # that are the commands of that name where they stand alone
OPENINGS = ("Explain how a rainbow forms.", "Write a Python function that reverses a list.",
            "Give three tips for better sleep.")  # fmt: skip  # those of the page
MIN_COMPARED = 32  # tokens of an answer whose speed says something


def prepare_streams() -> None:
    """No character ends the chat: bytes that are no text are read, and characters that stdout
    cannot encode are written, as replacement characters."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with suppress(ImportError):  # there is none on Windows
            import readline  # from now on `input` edits lines

            if "libedit" not in (readline.__doc__ or ""):  # which cannot do it
                readline.parse_and_bind(
                    "set enable-bracketed-paste on"
                )  # pasted lines: one message


def read_line() -> str:
    """A line that was typed. `input` writes its prompt to stdout, even where answers alone belong
    there."""
    prompt = PROMPT if sys.stdin.isatty() else ""
    if prompt and not sys.stdout.isatty():
        typer.echo(prompt, nl=False, err=True)
        prompt = ""
    return input(prompt)


class Pace:
    """When each of an answer's tokens had come."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, float]] = []  # tokens so far, and the time

    def note(self, streaming: Any) -> int:
        """A piece has come; returns the number of tokens so far."""
        done = sum(streaming.guessed.values())
        self._marks.append((done, time.perf_counter()))
        return done

    def rate(self, count: int) -> float | None:
        """Tokens a second up to the piece that ends with token `count`, or the last one before,
        without the first piece, for which the prompt was read; None where there are too few."""
        reached = [mark for mark in self._marks if mark[0] <= count]
        if len(reached) < 2:
            return None
        (first, began), (last, ended) = reached[0], reached[-1]
        return (last - first) / max(ended - began, 1e-9)


@dataclass(frozen=True)
class Answered:
    """An answer that can be compared. `guessed`: its tokens by who drafted them."""

    prompt_ids: list[int]
    result: Any
    guessed: Mapping[str | None, int]
    pace: Pace

    @property
    def before_loop(self) -> int:
        """Tokens before one span is repeated to the end: all of them, mostly."""
        start = loop_start(self.result.token_ids)
        return len(self.result.token_ids) if start is None else start

    @property
    def copied(self) -> float:
        """The share of tokens that were copied from prompt or answer."""
        from_text = sum(n for who, n in self.guessed.items() if view.kind_of(who) == view.TEXT)
        return from_text / max(sum(self.guessed.values()), 1)


class Chat:
    """The conversation so far and what the person types. `continues`: why each message stands by
    itself; empty where they are turns of a conversation."""

    def __init__(
        self, engine: Any, settings: dict[str, Any], system: str | None, continues: str = ""
    ) -> None:
        self.engine, self.settings, self.tinted = engine, settings, view.can_tint()
        self.noted_reason = ""  # of the drafter, after the last answer
        self.noted_rewriting = False
        self.continues = continues
        if self.continues and system:
            raise UsageError(self.continues, hint="leave --system out")
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system, self.talk = system, self.engine.conversation(system)
        self.last: Answered | None = None
        self.tree: VerifiedTree | None = None  # of the newest step that verified draft tokens

    def run(self) -> None:
        prepare_streams()
        if self.tinted:
            self.say_legend()
        while True:
            try:
                line = read_line().strip()
            except KeyboardInterrupt:  # at the prompt it clears the line
                ctrl_c.taken()
                typer.echo(err=True)
                console.note("/exit or Ctrl-D leaves")
                continue
            except EOFError:
                if sys.stdin.isatty():
                    typer.echo(err=True)
                return
            if line.lower() in WORDS:
                line = f"/{line.lower()}"
            if line.startswith("/"):
                name, *argument = line.split(maxsplit=1)
                name = name.lower()
                if name in ("/exit", "/quit"):
                    return
                self.command(name, "".join(argument))
            elif line:
                self.answer(line)

    def answer(self, line: str) -> None:
        """A message that cannot be answered is left out of the conversation, which goes on."""
        try:
            self._answer(line)
        except ContextLengthError as error:
            console.warn(f"{error.message}; /reset forgets the conversation")
        except MedusaKitError as error:
            console.warn(str(error))

    def _answer(self, line: str) -> None:
        if self.continues:
            self.reset(None)
        with view.AnswerView(self.tinted) as shown, keys_unseen():
            shown.status("prefilling the prompt")
            streaming, pace = self.talk.stream(line, **self.settings), Pace()
            streaming.keep_tree()
            try:
                with interrupt.between_steps(lambda: bool(streaming.guessed)) as check:
                    for piece in streaming:
                        shown.show(piece, streaming.tokens_per_second)
                        pace.note(streaming)
                        check()
            except KeyboardInterrupt:
                ctrl_c.taken()
                shown.finish()
                streaming.close()  # so that the next turn finds what it has read
                shown.finish(" …")
            except MedusaKitError:
                shown.finish()
                typer.echo()
                raise
        typer.echo()
        result, self.tree = streaming.result, streaming.tree or self.tree
        self.last = Answered(self.talk.prompt_ids, result, dict(streaming.guessed), pace)
        self.close(result, streaming.guessed)

    def close(self, result: Any, guessed: Mapping[str | None, int]) -> None:
        """Print the notes after an answer."""
        verbose = console.shows_details()
        console.note(view.closing(result, self.settings["max_new_tokens"], verbose))
        if guessed and result.stats.drafter != "none":
            console.detail(view.origins(guessed))
        self.note_reason(result.stats.drafter_notes)
        if self.talk.rewritten and not self.noted_rewriting:
            console.note("the chat template changes earlier turns, which are read again each time")
            self.noted_rewriting = True

    def note_reason(self, drafter_notes: list[str]) -> None:
        """Print why drafting went as it did: once where it holds for every answer; figures of this
        one only for who asks for them."""
        from medusa_kit.infer.decode.drafter import first_reason

        reason = first_reason(drafter_notes)
        if reason and reason != self.noted_reason:
            console.note(reason)
        self.noted_reason = reason
        for note in drafter_notes:
            if note != reason:
                console.detail(note)

    def command(self, name: str, argument: str = "") -> None:
        if name == "/help":
            typer.echo(view.two_columns(COMMANDS, console.err.width), err=True)
        elif name == "/reset":
            self.reset(self.system)
            kept = "; the system message stays" if self.system else ""
            console.note(f"the conversation is forgotten{kept}")
        elif name == "/system":
            self.set_system(argument or None)
        elif name == "/tree":
            self.draw_tree()
        elif name == "/accepted":
            self.accepted()
        elif name == "/compare":
            self.compare()
        else:
            console.warn(f"{name} is no command; /help lists them")

    def set_system(self, text: str | None) -> None:
        if self.continues:
            console.warn(f"{self.continues}, and takes no system message")
            return
        self.reset(text)
        console.note(f"a new conversation {'with this' if text else 'without a'} system message")

    def draw_tree(self) -> None:
        from medusa_kit.tree.render import describe_tree

        if self.tree is not None:
            tokenizer = self.engine.base.tokenizer
            texts = [tokenizer.decode([token]) for token in self.tree.tokens]
            typer.echo(drawing(self.tree, texts, console.err.width), err=True)
        else:
            typer.echo(describe_tree(self.engine.tree), err=True)

    def accepted(self) -> None:
        if not view.can_tint():
            console.warn("colours need a terminal that has them, and no NO_COLOR")
            return
        self.tinted = not self.tinted
        if self.tinted:
            self.say_legend()
        else:
            console.note("plain text from now on")

    def say_legend(self) -> None:
        if self.engine.own_drafter == "none":
            return
        sources = {view.HEADS: self.engine.heads, view.DRAFT_MODEL: self.engine.draft_model}
        kinds = [kind for kind in view.TINTS if sources.get(kind, True) is not None]
        view.say_legend(kind for kind in kinds if kind != view.BASE)

    def compare(self) -> None:
        if self.last is None:
            console.warn("there is no answer yet to compare with")
            return
        result, count = self.last.result, self.last.before_loop
        if not result.token_ids:
            console.warn("the last answer was stopped before its first token")
            return
        settings = {**self.settings, "max_new_tokens": count, "drafter": "none"}
        streaming, pace = self.engine.stream(self.last.prompt_ids, **settings), Pace()
        with view.AnswerView(tinted=False) as shown, keys_unseen():
            shown.status("answering again with plain decoding")
            try:
                with interrupt.between_steps(lambda: True) as check:  # what was read is kept
                    for _ in streaming:
                        done = pace.note(streaming)
                        shown.again(f"answering again with plain decoding: {done:,} of {count:,}")
                        check()
            except (KeyboardInterrupt, MedusaKitError) as error:
                ctrl_c.taken()
                shown.finish()
                streaming.close()
                stopped = isinstance(error, KeyboardInterrupt)
                console.warn("comparison stopped" if stopped else str(error))
                return
        plain = streaming.result
        comparison = f"{self._speeds(plain, pace)}, {self._agreement(result, plain)}"
        copied = f"; {self.last.copied:.0%} of the answer was copied from earlier text"
        console.note(comparison + copied + notes.rule_note(result.stats))

    def _speeds(self, plain: Any, plain_pace: "Pace") -> str:
        """The speeds of both, without the prompt, which was read for the first answer alone, and
        without a loop at the answer's end."""
        assert self.last is not None
        result, count = self.last.result, self.last.before_loop
        whole = count == len(result.token_ids)
        if whole:
            rates = [one.stats.decoding_tokens_per_second for one in (result, plain)]
        else:
            rates = [one.rate(count) for one in (self.last.pace, plain_pace)]
        drafting_rate, plain_rate = rates
        before = "" if whole else " before its loop"
        if drafting_rate is None or plain_rate is None or count < MIN_COMPARED:
            return f"{view.counted(count, 'token')}{before}: too short to compare speeds"
        return (
            f"plain decoding: {view.speed(plain_rate)} tokens/s; "
            f"with drafting {view.speed(drafting_rate)}, "
            f"{drafting_rate / plain_rate:.2f} x as fast{before}"
        )

    def _agreement(self, result: Any, plain: Any) -> str:
        assert self.last is not None
        if plain.token_ids == result.token_ids[: self.last.before_loop]:
            return "the same tokens"
        if result.stats.acceptance == "typical":
            return "other tokens, as typical acceptance allows"
        if result.stats.near_ties or plain.stats.near_ties:
            return "other tokens after a near-tie, which rounding decides"
        return "OTHER TOKENS"
