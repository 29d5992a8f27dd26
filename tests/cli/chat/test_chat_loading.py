"""The prompt of a chat that still loads: its sign is there, and what is typed waits."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.debug_model import PLAIN

from medusa_kit import console
from medusa_kit.cli.chat.conversation import PROMPT

Terminal = Callable[[int], Any]


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())


def test_stages_stand_behind_the_prompt_and_what_is_typed(terminal: Terminal, typing: None) -> None:
    screen = terminal(60)
    with console.stages("first things", PROMPT):
        assert screen.lines == ["›  first things …"]
        screen.write("hel")  # as the terminal shows what is typed
        console.stage("second things")
        assert screen.lines == ["› hel second things …"]
        console.note("a note")
        assert screen.lines == ["a note", "›  second things …"]
        console.stage("third things")
        assert screen.lines == ["a note", "›  third things …"]
    assert screen.lines == ["a note"]
    assert sys.stderr is screen


def test_a_bar_stands_in_the_prompt_s_place(terminal: Terminal, typing: None) -> None:
    screen = terminal(100)
    with console.stages("reading", PROMPT):
        with console.progress("packing", 3, "layers", brief=True) as bar:
            console.stage("packing")  # as what it packs with may say, too
            bar.advance(2)
            bar._progress.refresh()  # as it is each tenth of a second
            assert "2/3" in screen.lines[0]
            assert PROMPT.strip() not in screen.lines[0]
        console.stage("checking")
        assert screen.lines == ["›  checking …"]
    assert screen.lines == []


def test_without_a_terminal_to_type_in_there_is_a_spinner(terminal: Terminal) -> None:
    screen = terminal(60)
    with console.stages("loading", PROMPT):
        assert "loading …" in screen.lines[0]
        assert PROMPT.strip() not in screen.lines[0]


def chat(*arguments: str, typed: bytes = b"", then: int | None = None) -> tuple[int, str]:
    """(exit code, all that its terminal shows) of a chat in which this is typed, or which gets this
    signal, as soon as its prompt is there."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONUTF8": "1", "TERM": "xterm", "INPUTRC": os.devnull,
                   "NO_COLOR": "1"}  # fmt: skip
    command = [sys.executable, "-m", "medusa_kit", "chat", *arguments]
    seen = b""
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as running:
        waiting = True
        while select.select([ours], [], [], 0.1)[0] or running.poll() is None:
            if select.select([ours], [], [], 0)[0]:
                seen += os.read(ours, 4096)
            if waiting and PROMPT.encode() in seen:
                waiting = False
                os.write(ours, typed)
                if then is not None:
                    running.send_signal(then)
    os.close(theirs)  # not before: what is unread may go with the last who has it open
    os.close(ours)
    return running.returncode, seen.decode()


@pytest.mark.slow
def test_what_is_typed_while_it_loads_is_answered() -> None:
    code, shown = chat(*PLAIN, typed=b"Say hello.\n/exit\n")
    assert code == 0
    first, loaded = shown.index("loading the libraries"), shown.index("debug-tiny (llama")
    assert shown.index("Say hello.") < loaded, "the terminal shows what is typed"
    assert shown.index(PROMPT) < first < loaded
    assert shown.index("8 tokens in", loaded) < shown.index(PROMPT + "/exit", loaded)


def test_ctrl_c_while_it_loads_ends_it() -> None:
    code, shown = chat(*PLAIN, then=signal.SIGINT)
    assert code == 130
    assert "\r\x1b[" in shown, "the prompt's line is erased"
    assert "Traceback" not in shown
    assert "debug-tiny (llama" not in shown


def test_an_error_of_loading_ends_it() -> None:
    code, shown = chat("-m", "nowhere/at/all", typed=b"Say hello.\n")
    assert code == 1
    assert "error: no model at nowhere/at/all" in shown
    assert shown.endswith("hint: check the path\r\n")
    assert "Traceback" not in shown
