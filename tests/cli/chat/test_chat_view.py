"""What a chat writes while it answers: on a terminal in memory, and into a pipe."""

import io
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import medusa_kit
from medusa_kit import console
from medusa_kit.cli.chat import view
from medusa_kit.cli.chat.conversation import COMMANDS, OPENINGS, Chat
from medusa_kit.cli.chat.drawing import drawing
from medusa_kit.engine.conversation import Conversation
from medusa_kit.engine.streaming import Piece, Span
from medusa_kit.errors import DataError, DeviceMemoryError
from medusa_kit.infer.decode.drafter import COUNTS, NODES
from medusa_kit.infer.details import VerifiedTree

TEXT = "Rivers carry water from the hills to the sea, and some of them are long. "
Terminal = Callable[[int], Any]


def piece(*texts: str, by: str | None = None) -> Piece:
    """Guessed tokens, and the base model's own after them."""
    return Piece([*(Span(text, by) for text in texts[:-1]), Span(texts[-1], None)])


class Answers:
    """Stands for an engine whose answers are these pieces; an exception among them is raised."""

    heads = draft_model = graphs = tree = None
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

    def keep_tree(self) -> None:
        pass

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
             "quantization": None, "activations": "float32", "cached_tokens": 0}  # fmt: skip
    return SimpleNamespace(
        text=text, finish_reason=reason, token_ids=[1], stats=SimpleNamespace(**usual | stats)
    )


def chat_with(engine: Any) -> Chat:
    return Chat(engine, {"max_new_tokens": 512, "temperature": 0.7}, None)


def wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


@pytest.mark.parametrize("width", [18, 30, 31, 32, 33, 80])
def test_speed_is_shown_while_answering_and_gone_afterwards(terminal: Terminal, width: int) -> None:
    """Whatever the lines' ends cut: the answer stands there as if nothing else had been written."""
    screen, shown = terminal(width), list[str]()
    pieces = [piece(f"{word} ") for word in TEXT.split()]
    chat_with(Answers(pieces, lambda: shown.append("\n".join(screen.lines)))).answer("Rivers?")
    text = wrapped("".join(pieces), width)
    closing = "84 tokens in 0.6 s, 140 tokens/s; 1.9 tokens per step"
    assert screen.lines == text + wrapped(closing, width)
    live = [state for state in shown if "123 tokens/s" in state]
    assert 0 < len(live) < len(shown) or width < 24
    assert "prefilling the prompt" in shown[0] or width < 30


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


@pytest.mark.parametrize("width", [20, 35, 90])
def test_a_terminal_resized_while_answering_keeps_no_status(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    screen = terminal(60)
    with view.AnswerView(tinted=False) as shown:
        shown.show(piece("Rivers carry water to the "), 123.4)
        assert "123 tokens/s" in screen.lines[0]
        screen.resize(width)
        for one in (console.out, console.err):
            monkeypatch.setattr(one, "width", width)
        shown.show(piece("sea."), 123.4)
    assert "".join("".join(screen.lines).split()) == "Riverscarrywatertothesea."


def drafting() -> Answers:
    engine = Answers([piece("own "), piece("headed ", "then ", by="medusa"),
                      piece("copied ", "last", by="past")])  # fmt: skip
    engine.heads = object()  # type: ignore[assignment]
    return engine


LEGEND = "colours of drafted tokens: by the heads, from earlier text; /accepted switches them off"


def test_tokens_are_tinted_by_who_drafted_them_from_the_start(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The legend stands there once, before the first answer."""
    screen, lines = terminal(100), iter(["tinted", "again", "/accepted", "plain", "/accepted"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr("builtins.input", lambda _: next(lines, "/exit"))
    chat_with(drafting()).run()
    assert screen.lines[0] == LEGEND
    assert (screen.style_of("heads"), screen.style_of("earlier")) == ("32", "36")
    answers = [row for row, line in enumerate(screen.lines) if line.startswith("own headed")]
    styles = [[screen.cells[row, at][1] for at in (0, 4, 11, 16, 23)] for row in answers]
    assert styles == [["", "32", "", "36", ""]] * 2 + [[""] * 5]
    assert screen.lines.count(LEGEND) == 2  # once more where they are switched on again
    assert "plain text from now on" in screen.lines


@pytest.mark.parametrize("without", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_tints_and_no_legend_where_there_are_no_colours(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, without: tuple[str, str]
) -> None:
    screen = terminal(100)
    monkeypatch.setenv(*without)
    monkeypatch.setattr(console.out, "no_color", without[0] == "NO_COLOR")
    monkeypatch.setattr(console.err, "no_color", without[0] == "NO_COLOR")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    lines = iter(["Rivers?"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, "/exit"))
    chat_with(drafting()).run()
    assert screen.lines[0] == "own headed then copied last"
    assert {style for _, style in screen.cells.values()} <= {"", "2"}


def test_a_pipe_gets_the_text_and_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = chat_with(Answers([piece("own "), piece("headed ", "then", by="medusa")]))
    chat.tinted = True
    chat.answer("Rivers?")
    chat.command("/accepted")
    out, err = capsys.readouterr()
    assert out == "own headed then\n"
    assert "warning: colours need a terminal" in err.splitlines()[-1]
    assert not any(character < " " for character in err.replace("\n", ""))


@pytest.mark.parametrize("forced", [False, True])
def test_what_is_no_terminal_gets_exactly_the_text(
    monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    """Lines however long, control characters, spaces at the end; also where colours are forced."""
    text = "x" * 300 + " a\x1b[2J\r\n\tb \u0301日本 \n" + TEXT * 4 + "  "
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8", newline=""))
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    chat_with(Answers([piece(text[:150], text[150:320], by="medusa"), piece(text[320:])])).answer(
        ""
    )
    sys.stdout.flush()
    assert written.getvalue().decode() == text + "\n"


def test_tokens_without_text_are_counted() -> None:
    words = view.origins({None: 2, "medusa": 3, "suffix": 1, "past": 1})
    assert words == "tokens from the model itself: 2, the heads: 3, earlier text: 2"


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


WORDED = {
    "end": (answer(), "84 tokens in 0.6 s, 140 tokens/s; 1.9 tokens per step"),
    "limit": (answer(reason="length", new_tokens=512, seconds=3.66), "512 tokens in 3.7 s, 140 "
              "tokens/s; 1.9 tokens per step; stopped at the limit of 512 tokens (-n)"),
    "limit of one": (answer(reason="length", new_tokens=1, num_steps=0, seconds=0.04), "1 token in "
                     "0.0 s, 140 tokens/s; stopped at the limit of 1 token (-n)"),
    "context": (answer(reason="length"), "84 tokens in 0.6 s, 140 tokens/s; 1.9 tokens per step; "
                "stopped where the context is full"),
    "plain": (answer(drafter="none", tokens_per_second=7.26), "84 tokens in 0.6 s, 7.3 tokens/s"),
    "one": (answer(new_tokens=1, num_steps=0, seconds=0.04), "1 token in 0.0 s, 140 tokens/s"),
    "none": (answer(new_tokens=0, num_steps=0, reason="cancelled"), "stopped by Ctrl-C"),
    "empty": (answer(new_tokens=0, num_steps=0), "an empty answer"),
    "later turn": (answer(cached_tokens=1234, prompt_tokens=1250, first_token_seconds=0.018),
                   "84 tokens in 0.6 s, 140 tokens/s; 1.9 tokens per step"),
    "lossy": (answer(lossy=True, lossy_by=["int8 weights"]), "84 tokens in 0.6 s, 140 tokens/s; "
              "1.9 tokens per step; LOSSY: int8 weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WORDED))
def test_the_closing_line_is_in_words(case: str) -> None:
    result, words = WORDED[case]
    assert view.closing(result, 1 if case == "limit of one" else 512) == words


def test_figures_of_the_machine_are_said_to_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    notes = [f"{NODES}2.06 verified a step", f"{COUNTS}1.00 with suffix (3 steps)"]
    engine = Answers([piece("own ", "headed", by="medusa")])
    later = answer("Yes.", drafter_notes=notes, cached_tokens=1234, prompt_tokens=1250,
                   first_token_seconds=0.018)  # fmt: skip
    engine.__class__ = type("Noted", (Answers,), {"result": property(lambda self: later)})
    for verbose in (False, True):
        with console.details(verbose):
            chat_with(engine).answer("a")
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (4 if verbose else 1)
    assert lines[0].endswith("; the first after 0.02 s, 1,234 of 1,250 prompt tokens cached")
    assert lines[1:] == ["tokens from the model itself: 1, the heads: 1", *notes]


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


def test_the_newest_tree_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """In ASCII; of a step that verified draft tokens, where one did."""
    texts = [" sea", " is", " was", " blue", " <b>wet</b>", "\n", " calm"]
    tree = VerifiedTree([-1, 0, 0, 1, 1, 3, 2], list(range(7)), [1, 3, 5])
    engine = drafting()
    engine.tree = tree  # type: ignore[assignment]
    tokenizer = SimpleNamespace(decode=lambda ids: texts[ids[0]], chat_template="")
    chat = chat_with(engine)
    chat.answer("Rivers?")
    engine.base = SimpleNamespace(tokenizer=tokenizer, stop_token_ids=frozenset())
    capsys.readouterr()
    chat.command("/tree")
    assert capsys.readouterr().err.splitlines() == [
        "6 draft tokens, 3 accepted (*), after the model's own:",
        '* " sea"',
        '|- * " is"',
        '|  |- * " blue"',
        '|  |  `- * "\\n"',
        '|  `- " <b>wet</b>"',
        '`- " was"',
        '   `- " calm"',
    ]
    assert max(map(len, drawing(tree, texts, 12).splitlines()[1:])) == 12


@pytest.mark.parametrize("width", [20, 30, 80, 160])
def test_the_commands_are_listed_in_whole_words(width: int) -> None:
    lines = view.two_columns(COMMANDS, width).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == " ".join(f"{a} {b}" for a, b in COMMANDS.items())
    assert len(lines) == len(COMMANDS) or width < 160


def test_a_model_s_control_characters_move_no_cursor(terminal: Terminal) -> None:
    screen = terminal(60)
    chat_with(Answers([piece("a\x1b[2J\x07b\r\nc\u009b1A")])).answer("Rivers?")
    lines = [line.replace(" ", "") for line in screen.lines]  # of wide characters
    assert lines[:2] == ["a\ufffd[2J\ufffdb", "c\ufffd1A"]


def test_a_closing_line_names_a_loop() -> None:
    stats = SimpleNamespace(
        new_tokens=70, seconds=1.0, tokens_per_second=70.0, drafter="none", num_steps=69,
        lossy=False, quantization=None, activations="float32",
    )  # fmt: skip
    result = SimpleNamespace(
        token_ids=[*range(10), *[40, 41, 42] * 20], stats=stats, finish_reason="length"
    )
    said = view.closing(result, 70)
    assert "from token 14 on it is a loop, one span over and over: --repetition-penalty" in said
    result.token_ids[-1] = 0
    assert "loop" not in view.closing(result, 70)


def test_openings_are_those_of_the_page() -> None:
    page = (Path(medusa_kit.__file__).parent / "serve/page/index.html").read_text()
    assert re.findall(r"<li><button type=\"button\">(.*)</button>", page) == list(OPENINGS)
