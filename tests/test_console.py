"""Notes and warnings where stderr cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_kit import console

CODE = """
import threading
from medusa_kit import console
def speak():
    for _ in range(300):
        console.note("a line of some length " * 4)
        console.warn("another")
    print("done")
thread = threading.Thread(target=speak)
thread.start()
thread.join()
print(len(console.err._buffer))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_under_stderr_fails_nothing() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=full)
    assert done.stdout.split() == [b"done", b"0"]


def test_a_closed_pipe_under_stderr_ends_no_thread() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=closed)
    assert done.stdout.split() == [b"done", b"0"]


def test_work_may_turn_out_to_be_more_or_less(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("counting", 5, "sheep") as bar:
        bar.expect(2)
        bar.advance(1)
        bar.advance(1)
    assert capsys.readouterr().err.startswith("counting: 2 of 2, 0 s left")


def test_lines_arrive_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console.note("[bold] a note")
    console.warn("x" * 300)
    assert capsys.readouterr().err == "[bold] a note\nwarning: " + "x" * 300 + "\n"
