"""What a chat writes while it answers: on a terminal in memory, and into a pipe."""

import io
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_kit.cli.chat import view
from medusa_kit.cli.chat.conversation import Chat
from medusa_kit.engine.conversation import Conversation
from medusa_kit.engine.streaming import Piece, Span
from medusa_kit.errors import DataError, DeviceMemoryError
from medusa_kit.infer.draft import COUNTS

TEXT = "Rivers carry water from the hills to the sea, and some of them are long. "
Terminal = Callable[[int], Any]


def piece(*texts: str, by: str | None = None) -> Piece:
    """Guessed tokens, and the base model's own after them."""
    return Piece([*(Span(text, by) for text in texts[:-1]), Span(texts[-1], None)])


class Answers:
    """Stands for an engine whose answers are these pieces; an exception among them is raised."""

    heads = draft_model = None
    own_drafter, drafter_options = "auto", {}
    base = SimpleNamespace(tokenizer=None, stop_token_ids=frozenset())
    ended = failed = False

    def __init__(self, pieces: Sequence[Any], seen: Callable[[], None] = lambda: None) -> None:
        self.pieces, self.seen, self.tokens_per_second = pieces, seen, 123.4
        spans = [span for one in pieces if isinstance(one, Piece) for span in one.spans]
        self.guessed = Counter(span.guessed_by for span in spans)
        self.asked: list[Any] = []

    def stream(self, prompt: Any, **settings: Any) -> "Answers":
        self.asked.append(prompt)
        self.ended = self.failed = False
        return self

    def conversation(self, system: str | None) -> Conversation:
        return Conversation(self, system)  # type: ignore[arg-type]

    def encode(self, messages: Any) -> Any:
        return messages

    def close(self) -> None:
        self.ended = True

    def __iter__(self) -> Any:
        for one in self.pieces:
            self.seen()
            if isinstance(one, Piece):
                yield one
            else:
                self.ended, self.failed = True, isinstance(one, Exception)
                raise one
        self.seen()
        self.ended = True

    @property
    def result(self) -> Any:
        return answer(text="".join(one for one in self.pieces if isinstance(one, str)))


def answer(text: str = "", reason: str = "stop", **stats: Any) -> Any:
    usual = {"new_tokens": 84, "seconds": 0.6, "tokens_per_second": 140.2, "drafter": "auto",
             "num_steps": 44, "acceptance_length": 1.886, "drafter_notes": [], "lossy": False,
             "quantization": None, "cached_tokens": 0}  # fmt: skip
    return SimpleNamespace(
        text=text, finish_reason=reason, token_ids=[1], stats=SimpleNamespace(**usual | stats)
    )


def chat_with(engine: Any) -> Chat:
    return Chat(engine, {"max_new_tokens": 512, "temperature": 0.7}, None)


def wrapped(text: str, width: int) -> list[str]:
    return [text[start : start + width].rstrip() for start in range(0, len(text), width)]


@pytest.mark.parametrize("width", [18, 30, 31, 32, 33, 80])
def test_speed_is_shown_while_answering_and_gone_afterwards(terminal: Terminal, width: int) -> None:
    """Whatever the lines' ends cut: the answer stands there as if nothing else had been written."""
    screen, shown = terminal(width), list[str]()
    pieces = [piece(f"{word} ") for word in TEXT.split()]
    chat_with(Answers(pieces, lambda: shown.append("\n".join(screen.lines)))).answer("Rivers?")
    text = wrapped("".join(pieces), width)
    closing = (
        "84 tokens in 0.6 s (140 tokens/s); 1.9 tokens per step; stopped at the end of the answer"
    )
    assert screen.lines == text + wrapped(closing, width)
    live = [state for state in shown if "123 tokens/s" in state]
    assert 0 < len(live) < len(shown)
    assert "reading the prompt" in shown[0] or width < 24


def test_no_speed_where_the_terminal_has_no_room(terminal: Terminal) -> None:
    screen = terminal(12)
    with view.AnswerView(tinted=False) as shown:
        shown.show(piece("Yes"), 123.4)
        assert screen.lines == ["Yes"]


def test_ctrl_c_leaves_the_answer_and_nothing_else(terminal: Terminal) -> None:
    """What the terminal echoes for Ctrl-C goes too."""
    screen = terminal(60)
    pieces = [piece("Rivers "), piece("carry"), KeyboardInterrupt()]

    def typed() -> None:
        if "carry" in screen.lines[0]:
            screen.write("^C")

    chat_with(Answers(pieces, typed)).answer("Rivers?")
    assert screen.lines[0] == "Rivers carry …"
    assert not any("123 tokens/s" in line or "^C" in line for line in screen.lines)


def test_accepted_tints_tokens_by_who_guessed_them(terminal: Terminal) -> None:
    screen = terminal(100)
    engine = Answers([piece("own "), piece("headed ", "then ", by="medusa"),
                      piece("copied ", "last", by="past")])  # fmt: skip
    engine.heads = object()  # type: ignore[assignment]
    chat = chat_with(engine)
    chat.answer("plain")
    assert {screen.style_of(word) for word in ("own", "headed", "copied")} == {""}
    chat.command("/accepted")
    assert screen.lines[-1] == "tokens from the base model alone, heads, text"
    assert (screen.style_of("heads"), screen.style_of("text")) == ("32", "36")
    screen.cells.clear()
    chat.answer("tinted")
    styles = [screen.style_of(word) for word in ("own", "headed", "then", "copied", "last")]
    assert styles == ["", "32", "", "36", ""]
    assert screen.lines[-1] == "tokens from the base model alone: 3, heads: 1, text: 1"
    chat.command("/accepted")
    screen.cells.clear()
    chat.answer("plain again")
    assert screen.style_of("headed") == ""
    assert "tokens from" not in "".join(screen.lines)


def test_a_pipe_gets_the_text_and_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = chat_with(Answers([piece("own "), piece("headed ", "then", by="medusa")]))
    chat.tinted = True
    chat.answer("Rivers?")
    chat.command("/accepted")
    out, err = capsys.readouterr()
    assert out == "own headed then\n"
    assert err.splitlines()[-1] == "warning: tints need a terminal with colours"
    assert not any(character < " " for character in err.replace("\n", ""))


def test_tokens_without_text_are_counted() -> None:
    words = view.origins({None: 2, "medusa": 3, "suffix": 1, "past": 1})
    assert words == "tokens from the base model alone: 2, heads: 3, text: 2"


def test_a_message_that_cannot_be_answered_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(Answers):
        def encode(self, messages: Any) -> Any:
            if messages[-1]["content"] == "a":
                raise DataError("the template refuses", hint="rephrase it")
            return messages

    engine = Refusing([])
    chat = chat_with(engine)
    chat.answer("a")
    assert capsys.readouterr() == ("", "warning: the template refuses\nhint: rephrase it\n")
    engine.pieces = [piece("Riv"), DeviceMemoryError("memory is full")]
    chat.answer("b")
    assert capsys.readouterr() == ("Riv\n", "warning: memory is full\n")
    assert (chat.talk.messages, chat.last) == ([], None)
    engine.pieces = [piece("Yes.")]
    chat.answer("c")
    assert [one["content"] for one in chat.talk.messages] == ["c", "Yes."]


def test_characters_that_a_stream_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    typed, written = io.BytesIO(b"caf\xe9?\n"), io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, encoding="utf-8"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    engine = Answers([piece("日本 été")])
    chat_with(engine).run()
    sys.stdout.flush()
    assert engine.asked == [[{"role": "user", "content": "caf\ufffd?"}]]
    assert written.getvalue() == "?? été\n".encode("latin-1")


def test_columns_are_counted_as_terminals_do() -> None:
    assert view.column_after(0, "abc", 10) == 3
    assert view.column_after(8, "abc", 10) == 1
    assert view.column_after(0, "x" * 10, 10) == 10
    assert view.column_after(9, "日本", 10) == 4
    assert view.column_after(3, "ab\ncd", 10) == 2
    assert view.column_after(3, "\t!", 80) == 9


WORDED = {
    "end": (answer(), "84 tokens in 0.6 s (140 tokens/s); 1.9 tokens per step; "
            "stopped at the end of the answer"),
    "limit": (answer(reason="length", new_tokens=512, seconds=3.66), "512 tokens in 3.7 s (140 "
              "tokens/s); 1.9 tokens per step; stopped at the limit of 512 tokens"),
    "limit of one": (answer(reason="length", new_tokens=1, num_steps=0, seconds=0.04), "1 token in "
                     "0.0 s (140 tokens/s); stopped at the limit of 1 token"),
    "context": (answer(reason="length"), "84 tokens in 0.6 s (140 tokens/s); 1.9 tokens per step; "
                "stopped where the model's context is full"),
    "plain": (answer(drafter="none", tokens_per_second=7.26), "84 tokens in 0.6 s (7.3 tokens/s); "
              "stopped at the end of the answer"),
    "one": (answer(new_tokens=1, num_steps=0, seconds=0.04), "1 token in 0.0 s (140 tokens/s); "
            "stopped at the end of the answer"),
    "none": (answer(new_tokens=0, num_steps=0, reason="cancelled"), "stopped by Ctrl-C"),
    "later turn": (answer(cached_tokens=1234, prompt_tokens=1250, first_token_seconds=0.018),
                   "84 tokens in 0.6 s (140 tokens/s); 1.9 tokens per step; the first after 0.02 s,"
                   " 1,234 of 1,250 prompt tokens read before; stopped at the end of the answer"),
    "lossy": (answer(lossy=True, lossy_by=["int8 weights"]), "84 tokens in 0.6 s (140 tokens/s); "
              "1.9 tokens per step; stopped at the end of the answer; LOSSY: int8 weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WORDED))
def test_the_closing_line_is_in_words(case: str) -> None:
    result, words = WORDED[case]
    assert view.closing(result, 1 if case == "limit of one" else 512) == words


def test_a_note_that_stays_the_same_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Answers([piece("Yes.")])
    notes = [f"{COUNTS}1.00 with suffix (3 steps)", "no heads for 'x'"]
    noted = {"result": property(lambda self: answer("Yes.", drafter_notes=notes))}
    engine.__class__ = type("Noted", (Answers,), noted)
    chat = chat_with(engine)
    chat.answer("a")
    chat.answer("b")
    err = capsys.readouterr().err
    assert err.count("no heads for 'x'") == 1
    assert COUNTS not in err
