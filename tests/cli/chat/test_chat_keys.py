"""Keys that are typed while an answer comes."""

import os
import select
import sys
from collections.abc import Iterator

import pytest

from medusa_kit.cli.chat.keys import keys_unseen

termios = pytest.importorskip("termios")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """(the side of the person, the side of the program), which is standard input."""
    person, program = os.openpty()
    with os.fdopen(program) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield person, program
    os.close(person)


def echoes(terminal: int) -> bool:
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHO)


@pytest.mark.parametrize("ends_in", [None, KeyboardInterrupt])
def test_they_are_kept_and_not_shown(
    terminal: tuple[int, int], ends_in: type[BaseException] | None
) -> None:
    person, program = terminal
    assert echoes(program)
    try:
        with keys_unseen():
            assert not echoes(program)
            os.write(person, b"next\n")
            select.select([program], [], [])  # until the terminal has read it, still without echo
            if ends_in is not None:
                raise ends_in
    except KeyboardInterrupt:
        pass
    assert echoes(program)
    assert sys.stdin.readline() == "next\n"
    os.set_blocking(person, False)
    with pytest.raises(BlockingIOError):
        os.read(person, 10)


def test_a_pipe_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with os.fdopen(reading) as stdin, keys_unseen():
        monkeypatch.setattr(sys, "stdin", stdin)
        with keys_unseen():
            assert stdin.read() == ""
