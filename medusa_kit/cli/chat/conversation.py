"""The conversation, and the commands that a person can type in it."""

import io
import sys
from contextlib import suppress
from typing import Any

import typer

from medusa_kit import console
from medusa_kit.cli import options
from medusa_kit.cli.chat import interrupt, view
from medusa_kit.cli.chat.sampling import draws_guesses
from medusa_kit.errors import ContextLengthError, MedusaKitError

HELP = """/help           this list
/reset          forget the conversation
/system TEXT    start over with this system message
/compare        answer the last prompt once more plainly, and say how much faster the drafter is
/accepted       tint tokens by who guessed them, from now on; once more for plain text
/tree           draw the candidate tree
/exit           leave (so does Ctrl-D)
Ctrl-C stops an answer and keeps what there is."""
PROMPT = "› "


def prepare_streams() -> None:
    """No character ends the chat: bytes that are no text are read, and characters that stdout
    cannot encode are written, as replacement characters."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with suppress(ImportError):  # there is none on Windows
            import readline  # noqa: F401  # from now on `input` edits lines


def read_line() -> str:
    """A line that was typed. `input` writes its prompt to stdout, even where answers alone belong
    there."""
    prompt = PROMPT if sys.stdin.isatty() else ""
    if prompt and not sys.stdout.isatty():
        typer.echo(prompt, nl=False, err=True)
        prompt = ""
    return input(prompt)


class Chat:
    """The conversation so far and what the person types."""

    def __init__(self, engine: Any, settings: dict[str, Any], system: str | None) -> None:
        self.engine, self.settings, self.tinted = engine, settings, False
        self.noted = ""  # of the drafter, after the last answer
        self.noted_rewriting = False
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system, self.talk = system, self.engine.conversation(system)
        self.last: tuple[list[int], Any] | None = None  # prompt and answer

    def run(self) -> None:
        prepare_streams()
        while True:
            try:
                line = read_line().strip()
            except KeyboardInterrupt:  # at the prompt it clears the line
                typer.echo(err=True)
                continue
            except EOFError:
                if sys.stdin.isatty():
                    typer.echo(err=True)
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self.command(line)
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
        with view.AnswerView(self.tinted) as shown:
            shown.status("reading the prompt")
            streaming = self.talk.stream(line, **self.settings)
            try:
                with interrupt.between_steps(lambda: bool(streaming.guessed)) as check:
                    for piece in streaming:
                        shown.show(piece, streaming.tokens_per_second)
                        check()
            except KeyboardInterrupt:
                shown.clear()
                streaming.close()  # so that the next turn finds what it has read
                typer.echo(" …", nl=False)
            except MedusaKitError:
                shown.clear()
                typer.echo()
                raise
        typer.echo()
        result = streaming.result
        self.last = (self.talk.prompt_ids, result)
        console.note(view.closing(result, self.settings["max_new_tokens"]))
        if shown.tinted and streaming.guessed:
            console.note(view.origins(streaming.guessed))
        self.note_reason(result.stats.drafter_notes)
        if self.talk.rewritten and not self.noted_rewriting:
            console.note("the chat template changes earlier turns, which are read again each time")
            self.noted_rewriting = True

    def note_reason(self, notes: list[str]) -> None:
        """Why drafting went as it did, once where it holds for every answer."""
        from medusa_kit.infer.draft import COUNTS

        said = next((note for note in notes if not note.startswith(COUNTS)), "")
        if said and said != self.noted:
            console.note(said)
        self.noted = said

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            typer.echo(HELP, err=True)
        elif name == "/reset":
            self.reset(self.system)
        elif name == "/system":
            self.reset(rest.strip() or None)
        elif name == "/tree":
            from medusa_kit.tree.render import describe_tree

            typer.echo(describe_tree(self.engine.tree), err=True)
        elif name == "/accepted":
            self.accepted()
        elif name == "/compare":
            self.compare()
        else:
            console.warn(f"{name} is no command; /help lists them")

    def accepted(self) -> None:
        if not view.can_tint():
            console.warn("tints need a terminal with colours")
            return
        self.tinted = not self.tinted
        if not self.tinted:
            console.note("plain text again")
            return
        there = {view.HEADS: self.engine.heads, view.DRAFT_MODEL: self.engine.draft_model}
        kinds = [kind for kind in view.TINTS if there.get(kind, True) is not None]
        typer.echo(view.legend(kinds), err=True)

    def compare(self) -> None:
        if self.last is None:
            console.warn("there is no answer yet to compare with")
            return
        prompt, result = self.last
        if not result.token_ids:
            console.warn("the last answer was stopped before its first token")
            return
        settings = {**self.settings, "max_new_tokens": len(result.token_ids), "drafter": "none"}
        streaming = self.engine.stream(prompt, **settings)
        try:
            with interrupt.between_steps(lambda: True) as check:  # what was read is kept
                for _ in streaming:
                    check()
        except KeyboardInterrupt:
            streaming.close()
            console.warn("comparison stopped")
            return
        except MedusaKitError as error:
            console.warn(str(error))
            return
        plain = streaming.result
        # The prompt was read for the first answer, and is not read again for the second.
        ours, rate = (one.stats.decoding_tokens_per_second for one in (result, plain))
        speed = "an answer of one token has no speed"
        if ours is not None and rate is not None:
            speed = (
                f"plain decoding: {rate:.1f} tokens/s after the first; with drafter "
                f"{self.engine.own_drafter} {ours / rate:.2f} × as fast"
            )
        console.note(f"{speed}, {self._agreement(result, plain)}{options.rule_note(result.stats)}")

    def _agreement(self, result: Any, plain: Any) -> str:
        if plain.token_ids == result.token_ids:
            return "the same tokens"
        if self.settings["temperature"] > 0 and draws_guesses(self.engine.drafter_options):
            return "other words, as expected where guesses are drawn"
        if result.stats.near_ties or plain.stats.near_ties:
            return "other tokens after a near-tie, which rounding decides"
        return "OTHER TOKENS"
