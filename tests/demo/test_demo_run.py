"""Whole demos on the debug model: what is printed, stopped, short of time, and wrong."""

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa_kit.bench.bench import Method
from medusa_kit.bench.report import Answers
from medusa_kit.demo import comparison, own_heads
from medusa_kit.demo.work import LIMITS
from medusa_kit.errors import WriteError
from medusa_kit.train.loop import TrainingLoop

HEADS = Path("out/run/heads/heads.safetensors")


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """(stdout on one line, stderr)."""
    captured = capsys.readouterr()
    return " ".join(captured.out.split()), captured.err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, run_here: Any) -> tuple[Path, str]:
    """A demo that nothing stopped: the folder it ran in, and what it printed on one line."""
    folder, printed = tmp_path_factory.mktemp("whole"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        assert run_here() == 0
    return folder, " ".join(printed.getvalue().split())


def test_a_demo_and_the_same_again(
    demo: Any, whole: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = whole
    shutil.copytree(folder, Path.cwd(), dirs_exist_ok=True)
    assert "× plain decoding" in out
    assert "× transformers" in out
    assert "18 of 18 answers are those of transformers, token" in out
    assert "Done: 16 answers (192 tokens), 6 updates." in out
    assert "Not done" not in out
    assert "0 updates" in out
    assert "6 updates" in out
    assert "12 of 12 answers are those of plain decoding" in out
    assert "medusa-kit chat --heads out/run/heads" in out
    assert [path.name for path in Path.cwd().iterdir()] == ["out"]
    benches = [json.loads(path.read_text()) for path in Path("out").rglob("bench.json")]
    assert [len(bench["methods"]) for bench in benches] in ([4, 3], [3, 4])

    before = HEADS.read_bytes()
    assert demo() == 0
    out, err = printed(capsys)
    assert "The heads that an earlier run trained are used" in out
    assert "answering" not in err
    assert HEADS.read_bytes() == before


@pytest.mark.slow
def test_stopped_and_moved_while_training_it_ends_as_one_that_was_not(
    demo: Any, whole: tuple[Path, str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    expected = load_file(whole[0] / HEADS)
    original = TrainingLoop._update

    def stopped_at_three(self: TrainingLoop, update: Any) -> None:
        original(self, update)
        if self.step == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_update", stopped_at_three)
        assert demo(questions=1) == 130
    assert "`make demo` resumes" in printed(capsys)[1]
    Path("elsewhere").mkdir()
    Path("out").rename("elsewhere/out")
    monkeypatch.chdir("elsewhere")
    assert demo(questions=1) == 0
    out, err = printed(capsys)
    assert "continuing from update 3 of 6" in err
    assert "6 updates." in out
    found = load_file(HEADS)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_what_there_was_no_time_for_is_said(
    demo: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shipped", "answers", "training", "own"):
        monkeypatch.setitem(LIMITS, name, -1.0)
    assert demo(answers=40, updates=20, questions=8) == 0
    out, _ = printed(capsys)
    assert "no transformers generate" in out
    assert "6 of 8 prompts" in out
    assert "Not done within the time limit on this machine: 24 of 40 answers and" in out
    assert "of 20 updates" in out
    assert "too few prompts were measured" in out


@pytest.mark.slow
def test_heads_that_do_not_get_finished_are_resumed(
    demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(seconds=0.0) == 0
    out, _ = printed(capsys)
    assert "too slow or busy to finish these heads" in out
    assert "make demo # resume" in out
    assert not HEADS.exists()
    assert demo(questions=1) == 0
    assert "Done: 16 answers (192 tokens), 6 updates." in printed(capsys)[0]


@pytest.mark.slow
def test_stopped_before_training_it_learns_from_the_same_answers(
    demo: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although there is time for more when it is resumed, since their hidden states are kept."""

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(LIMITS, "answers", -1.0)
        patch.setattr(own_heads, "train", stopped)
        assert demo(answers=40, questions=1) == 130
    assert demo(answers=40, questions=1) == 0
    assert "Not done within the time limit on this machine: 24 of 40 answers." in printed(capsys)[0]


@pytest.mark.slow
def test_a_wrong_token_fails(
    demo: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = comparison.standard_methods

    def with_a_fault(*arguments: Any, **options: Any) -> list[Method]:
        *methods, last = original(*arguments, **options)

        def run(batch: Any) -> Answers:
            answers = last.run(batch)
            return replace(answers, token_ids=[ids[:-1] for ids in answers.token_ids])

        return [*methods, replace(last, run=run)]

    monkeypatch.setattr(comparison, "standard_methods", with_a_fault)
    assert demo(questions=2) == 1
    out, err = printed(capsys)
    assert "4 of 6 answers" in out
    assert "4 answers hold a wrong token" in err


def test_another_folder_is_left_alone(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    assert demo() == 2
    assert "holds other files than this demo's (notes.txt)" in printed(capsys)[1]
    assert [path.name for path in Path("out").iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_made(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").symlink_to("/dev/null/nowhere")
    assert demo() == 1
    assert "error: cannot write to out" in printed(capsys)[1]


def test_a_full_disk_is_named_as_such(
    demo: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise WriteError("the disk is full")

    monkeypatch.setattr("medusa_kit.engine.load.load", full)
    assert demo() == 1
    assert "error: the disk is full" in printed(capsys)[1]


def test_a_folder_of_another_demo_is_refused(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/demo.json").write_text("{}")
    assert demo() == 2
    assert "move or remove out" in printed(capsys)[1]
    assert Path("out/demo.json").read_text() == "{}"


SWALLOWS = """
import os, runpy, signal, sys

class Swallows:
    def __getattr__(self, name):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(9): pass
        except: ...
        return str

sys.modules["medusa_kit.demo.own_heads"] = Swallows()
sys.argv = ["demo"]
runpy.run_module("medusa_kit.demo", run_name="__main__")
"""


@pytest.mark.parametrize("error", ["...", "raise ImportError('half imported')"])
def test_ctrl_c_that_a_library_swallows_stops_the_program(error: str, tmp_path: Path) -> None:
    """Or makes another error of, in a process of its own."""
    code = SWALLOWS.replace("...", error)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    said = "interrupted; `make demo` resumes with the answers and updates so far\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)
