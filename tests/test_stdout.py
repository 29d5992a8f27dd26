"""A full disk at stdout is one error, whatever writes there; a reader that has left is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ERROR = "error: standard output cannot be written: "
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")

PRINTS = {
    "print": "print('a')",
    "much": "print('a' * 100_000)",
    "rich": "from medusa_kit.console import out; out.print('a')",
    "typer": "import typer; typer.echo('a')",
    "what catches errors": (
        "try: print('a' * 100_000)\nexcept Exception: print('caught', file=sys.stderr)"
    ),
    "what catches all": "try: print('a' * 100_000)\nexcept: pass",
}


def run(code: str, stdout: object) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom medusa_kit.stdout import ends_where_it_fails\n"
                               f"with ends_where_it_fails():\n    exec({code!r})"],
        stdout=stdout, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


@needs_full
@pytest.mark.parametrize("kind", PRINTS)
def test_a_full_disk(kind: str) -> None:
    with FULL.open("w") as full:
        code, (error, hint) = run(PRINTS[kind], full)
    assert (code, error) == (1, ERROR + "No space left on device")
    assert hint.startswith("hint: make room")


@pytest.mark.parametrize("kind", PRINTS)
def test_a_closed_pipe(kind: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run(PRINTS[kind], writing) == (141, [])
    finally:
        os.close(writing)


def test_what_can_be_written_is_written() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from medusa_kit.stdout import ends_where_it_fails\n"
                               "with ends_where_it_fails(): print('ä→')"],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ä→\n".encode())


@needs_full
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["generate", "--help"]])
def test_commands(words: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "medusa_kit", *words],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == ERROR + "No space left on device"
    assert len(done.stderr.splitlines()) == 2


def test_a_reader_that_leaves_early_ends_a_command_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "medusa_kit", "serve", "--help"],
            stdout=writing, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
