"""The chat in the terminal, typed by a stand-in for `input`."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from support.debug_model import MODEL, plain_answer, plain_text

import medusa_kit
from medusa_kit.cli.chat.interrupt import between_steps
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.scheduler import Scheduler

Run = Callable[..., tuple[int, str, str]]
Talk = Callable[..., tuple[int, str, str]]


class Typed:
    """Stands for `input`: types the lines, then end of file; an exception is raised instead."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = list(lines)

    def __call__(self, prompt: str = "") -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


@pytest.fixture
def chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> Talk:
    def talk(lines: list[str | type[BaseException]], *options: object) -> tuple[int, str, str]:
        monkeypatch.setattr("builtins.input", Typed(*lines))
        return run("chat", *MODEL, "-n", "8", "--greedy", *options)

    return talk


def test_chat_answers_and_leaves_at_the_end_of_file(chat: Talk) -> None:
    code, out, err = chat(["Name a tree.", "", "   "], "--heads", "none")
    assert code == 0
    assert out == plain_text("Name a tree.") + "\n"
    assert "drafter auto, no heads" in err
    assert "greedy: always the likeliest token" in err
    assert "8 tokens in " in err
    assert "1.0 tokens per step; stopped at the limit of 8 tokens" in err
    assert "none: " not in err
    assert not any(character < " " for character in err.replace("\n", ""))


def test_chat_says_that_weights_are_rounded(chat: Talk) -> None:
    _, _, err = chat(["Name a tree."], "--heads", "none", "--weights", "int8")
    assert "int8 weights: lossy); drafter" in err
    assert "limit of 8 tokens (-n); LOSSY: int8 weights" in err


@pytest.mark.parametrize("leave", ["/exit", "/quit", "/exit now", "/quit\tplease", "exit", "Quit"])
def test_chat_leaves_when_told(chat: Talk, leave: str) -> None:
    code, out, _ = chat([leave, "never reached"], "--heads", "none")
    assert (code, out) == (0, "")


def asked_of(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The conversations that reach the engine, in order, read off their ids."""
    asked: list[list[dict[str, str]]] = []
    original = Engine.stream

    def stream(self: Engine, prompt: Any, **options: Any) -> Any:
        text = self.base.tokenizer.decode(prompt)
        turns = [turn.split("\n", 1) for turn in text.split("<|im_start|>")[1:-1]]
        asked.append(
            [{"role": role, "content": said.removesuffix("<|im_end|>\n")} for role, said in turns]
        )
        return original(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", stream)
    return asked


def test_chat_remembers_until_it_is_told_to_forget(
    chat: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_of(monkeypatch)
    lines = ["a", "b", "/reset", "c", "/system Be kind.", "d", "/system", "e"]
    code, _, _ = chat(lines, "--heads", "none", "--system", "Be short.")
    assert code == 0
    roles = [[message["role"] for message in messages] for messages in asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"],
                     ["system", "user"], ["system", "user"], ["user"]]  # fmt: skip
    assert asked[1][2]["content"] == plain_answer(asked[0])
    assert [messages[0]["content"] for messages in asked[2:]] == ["Be short.", "Be kind.", "e"]
    assert [messages[-1]["content"] for messages in asked] == ["a", "b", "c", "d", "e"]


def ids_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Any]]:
    """(prompt, answer) of each call of the engine, as it is encoded; the answer once it is read."""
    calls: list[tuple[list[int], Any]] = []
    for name in ("stream", "generate"):
        original = getattr(Engine, name)

        def call(self: Engine, prompt: Any, original: Any = original, **options: Any) -> Any:
            calls.append((self.encode(prompt), original(self, prompt, **options)))
            return calls[-1][1]

        monkeypatch.setattr(Engine, name, call)
    return calls


def test_a_later_turn_reads_its_message_alone(chat: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The debug model writes bytes of no text: encoding its answer again gives other tokens."""
    calls = ids_of(monkeypatch)
    code, _, err = chat(["Name a tree.", "Another.", "/compare"], "--heads", "none",
                        "--verbose")  # fmt: skip
    assert code == 0
    (asked, first), (again, second), (compared, plain) = calls
    assert "\ufffd" in first.result.text
    read = [*asked, *first.result.token_ids]
    assert again[: len(read)] == read
    assert compared == again
    assert plain.result.token_ids == second.result.token_ids
    cached = second.result.stats.cached_tokens
    assert f"{cached} of {len(again)} prompt tokens cached" in err
    assert cached in (0, len(read) - 1, len(read))
    assert "read again" not in err


def test_chat_says_once_that_a_template_changes_earlier_turns(
    chat: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = medusa_kit.load

    def load(**options: Any) -> Engine:
        engine = original(**options)
        numbered = "{{ messages | length }}" + engine.base.tokenizer.chat_template
        engine.base.tokenizer.chat_template = numbered
        return engine

    monkeypatch.setattr(medusa_kit, "load", load)
    _, _, err = chat(["a", "b", "c"], "--heads", "none")
    assert err.count("the chat template changes earlier turns, which are read again") == 1


def test_chat_commands(chat: Talk, trained: Path) -> None:
    lines = ["/help", "/tree", "/compare", "Name a tree.", "/compare", "/nonsense"]
    code, out, err = chat(lines, "--heads", trained, "-n", "40")
    assert code == 0
    assert "/system TEXT" in err
    assert "root (" in err
    assert "/exit, /quit" in err
    assert out.startswith(plain_text("Name a tree."))  # the answers alone
    assert "tree of" not in out
    assert "warning: there is no answer yet to compare with" in err
    assert "3 heads, a tree of " in err
    assert "the same tokens" in err
    assert "warning: /nonsense is no command; /help lists them" in err
    assert "of the answer was copied from earlier text" in err


def test_help_alone_is_the_command(chat: Talk) -> None:
    code, out, err = chat(["help"], "--heads", "none")
    assert (code, out) == (0, "")
    assert "/system TEXT" in err


def test_ctrl_c_stops_the_answer_and_not_the_program(
    chat: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is of the answer is kept; at the prompt Ctrl-C only clears the line."""
    asked = asked_of(monkeypatch)
    original, interrupted = typer.echo, []

    def echo(message: Any = "", **options: Any) -> None:
        original(message, **options)
        if asked and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt

    monkeypatch.setattr("medusa_kit.cli.chat.view.typer.echo", echo)
    code, out, err = chat(["a", KeyboardInterrupt, "b"], "--heads", "none")
    assert code == 0
    assert out.count(" …\n") == 1
    assert "stopped by Ctrl-C\n" in err
    assert "stopped at the limit of 8 tokens (-n)\n" in err
    kept = asked[1][1]["content"]
    assert asked[1] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": kept},
                        {"role": "user", "content": "b"}]  # fmt: skip
    assert kept
    assert len(kept) < len(plain_text("a"))
    assert plain_text("a").startswith(kept)


def test_ctrl_c_within_a_step_waits_for_its_end(
    chat: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the next turn finds what has been read; where torch runs steps nothing is kept."""
    calls, steps, original = ids_of(monkeypatch), list[int](), Batch.step

    def step(self: Batch) -> Any:
        steps.append(1)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Batch, "step", step)
    code, out, err = chat(["Name a tree.", "Another."], "--heads", "none")
    assert code == 0
    assert "stopped by Ctrl-C\n" in err
    assert " …\n" in out
    (asked, first), (again, second) = calls
    assert len(first.result.token_ids) >= 4
    read = [*asked, *first.result.token_ids]
    assert again[: len(read)] == read
    in_cpp = second.result.stats.steps_run_by.startswith("C++")
    assert second.result.stats.cached_tokens == (len(read) - 1) * in_cpp
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_comparison_loses_nothing_that_was_read(
    chat: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, typed, original = ids_of(monkeypatch), list[int](), Batch.step

    def step(self: Batch) -> Any:
        if calls[0][1].ended and not typed:  # once, in the comparison
            typed.append(1)
            signal.raise_signal(signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Batch, "step", step)
    code, _, err = chat(["Name a tree.", "/compare", "Another."], "--heads", "none")
    assert code == 0
    assert "comparison stopped\n" in err
    (asked, first), _, (again, second) = calls
    read = [*asked, *first.result.token_ids]
    assert again[: len(read)] == read
    in_cpp = second.result.stats.steps_run_by.startswith("C++")
    # The comparison has written over the answer as far as it came.
    assert second.result.stats.cached_tokens >= len(asked) * in_cpp
    assert len(second.result.token_ids) == 8


def test_ctrl_c_before_the_answer_and_ctrl_c_twice_interrupt_at_once() -> None:
    with between_steps(lambda: False), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with between_steps(lambda: True) as check:
        check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of what runs in the background
    try:
        with between_steps(lambda: True) as check:
            signal.raise_signal(signal.SIGINT)
            check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_comparing_with_an_answer_stopped_before_its_first_token(
    chat: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "run", interrupt)
    code, _, err = chat(["a", "/compare"], "--heads", "none")
    assert code == 0
    assert "stopped before its first token" in err


def test_a_conversation_that_fills_the_context_can_be_reset(chat: Talk) -> None:
    code, out, err = chat(["x" * 1100, "/reset", "Name a tree."], "--heads", "none")
    assert code == 0
    assert "the model's context holds 1024" in err
    assert "/reset forgets the conversation" in err
    assert plain_text("Name a tree.") in out


@pytest.fixture
def without_template(monkeypatch: pytest.MonkeyPatch) -> None:
    original = medusa_kit.load

    def load(**options: Any) -> Engine:
        engine = original(**options)
        engine.base.tokenizer.chat_template = None
        return engine

    monkeypatch.setattr(medusa_kit, "load", load)


@pytest.mark.usefixtures("without_template")
def test_a_model_without_a_chat_template_continues_each_message(
    chat: Talk, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = ids_of(monkeypatch)
    code, _, err = chat(["Name a tree.", "/system Be kind.", "Name a tree."], "--heads", "none")
    assert code == 0
    assert err.count("no chat template: it continues each message as plain text") == 2
    assert "and takes no system message" in err
    assert [result.result.token_ids for _, result in calls][1:] == [calls[0][1].result.token_ids]
    code, _, err = chat(["a"], "--heads", "none", "--system", "Be kind.")
    assert code == 2
    assert "no chat template" in err
    assert "hint: leave --system out" in err
    _, _, err = run("generate", "a", *MODEL, "--heads", "none", "-n", "2")
    assert "no chat template" in err


def test_commands_say_what_they_did(chat: Talk) -> None:
    lines = ["/reset", "/SYSTEM Be kind.", "/Reset", "/system", KeyboardInterrupt, "/HELP", "/Exit"]
    code, _, err = chat([*lines, "never reached"], "--heads", "none")
    assert code == 0
    told = ["the conversation is forgotten\n", "a new conversation with this system message\n",
            "forgotten; the system message stays\n", "conversation without a system message\n",
            "/exit or Ctrl-D leaves\n", "/system TEXT"]  # fmt: skip
    places = [err.index(words) for words in told]
    assert places == sorted(places)
    assert "is no command" not in err
