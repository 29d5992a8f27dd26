"""The prompt of a chat in a real terminal: a line can be edited, and stdout has answers alone."""

import os
import subprocess
import sys
from typing import Any

import pytest

pty = pytest.importorskip("pty")
readline = pytest.importorskip("readline")

CHAT = """
import sys
from medusa_kit.cli.chat.conversation import Chat

class Echo(Chat):
    def reset(self, system):
        pass

    def say_legend(self):
        pass

    def answer(self, line):
        sys.stderr.write(ascii(line) + chr(10))

Echo(None, {}, None).run()
"""
PROMPT = "› ".encode()


def chat(stdout: Any, typed: bytes) -> tuple[bytes, bytes]:
    """(stdout where it is a pipe, stderr) of a chat on whose terminal this is typed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONUTF8": "1", "TERM": "vt100", "INPUTRC": os.devnull}
    with subprocess.Popen(
        [sys.executable, "-c", CHAT], stdin=theirs, stdout=stdout or theirs,
        stderr=subprocess.PIPE, env=environment,
    ) as running:  # fmt: skip
        os.write(ours, typed)
        out, err = running.communicate(timeout=60)
    os.close(theirs)
    os.close(ours)
    return out, err


def test_the_arrow_keys_move_within_the_line() -> None:
    _, err = chat(None, b"ab\x1b[D\x1b[DX\n/exit\n")
    assert err == b"'Xab'\n"


def test_pasted_lines_are_one_message() -> None:
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("libedit cannot tell what is pasted")
    _, err = chat(None, b"\x1b[200~one\n\ntwo\x1b[201~ three\n/exit\n")
    assert err == rb"'one\n\ntwo three'" + b"\n"


def test_the_prompt_is_no_answer() -> None:
    out, err = chat(subprocess.PIPE, b"ab\n/help\n\x04")
    assert out == b""
    assert err.startswith(PROMPT + b"'ab'\n" + PROMPT + b"/help  ")
    assert err.endswith(PROMPT + b"\n")
