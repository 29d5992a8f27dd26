"""Notes and warnings where stderr cannot be written."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.clocks import own_time

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


def test_a_number_that_is_none_is_a_dash() -> None:
    assert console.number(math.nan, ".1%") == console.number(None, ".3f") == "–"
    assert console.number(0.25, ".1%") == "25.0%"


def test_what_was_there_before_is_no_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is what is set up before the first step: of a run that goes on, 40 steps of 2 s each are
    left, whatever came before."""
    now = [0.0]
    own_time(monkeypatch, console, monotonic=lambda: now[0])
    with console.progress("training", 1000, unit="updates", done=900) as bar:
        now[0] = 3000.0
        for _ in range(60):
            now[0] += 2.0
            bar.advance()
        for _ in range(10):
            now[0] += 2.0
            bar.advance()
    last = capsys.readouterr().err.splitlines()[-1]
    found = re.search(r"training: ([\d,]+) of 1,000, ([\d,]+) s left", last)
    assert found is not None, last
    done, left = (float(part) for part in found.groups())
    assert left == pytest.approx(2 * (1000 - done), rel=0.05)
