"""What a person sees while something loads."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import medusa_kit
from medusa_kit import console

Terminal = Callable[[int], Any]


def test_stages_are_shown_and_nothing_is_left_of_them(terminal: Terminal) -> None:
    screen = terminal(60)
    with console.stages("first things"):
        assert "first things …" in screen.lines[0]
        console.stage("second things")
        assert "second things …" in screen.lines[0]
        console.note("a note")
        assert screen.lines[0] == "a note"
    assert screen.lines == ["a note"]
    assert sys.stderr is screen
    console.stage("nobody waits")
    assert screen.lines == ["a note"]


def test_the_spinner_makes_way_for_what_others_write(terminal: Terminal) -> None:
    screen = terminal(60)
    with console.stages("downloading"):
        stderr = sys.stderr
        stderr.write("model.safetensors:  10%")
        assert screen.lines == ["model.safetensors:  10%"]
        stderr.write("\rmodel.safetensors: 100%\n")
        console.stage("reading")
        assert screen.lines[0] == "model.safetensors: 100%"
        assert "reading …" in screen.lines[1]
    assert screen.lines == ["model.safetensors: 100%"]


def test_a_bar_stands_in_the_spinner_s_place(terminal: Terminal) -> None:
    screen = terminal(100)
    with console.stages("reading"):
        with console.progress("packing", 3, "layers", brief=True) as bar:
            console.note("packing the model")
            console.stage("packing")  # as what it packs with may say, too
            bar.advance(2)
            bar._progress.refresh()  # as it is each tenth of a second
            assert screen.lines[0] == "packing the model"
            assert "2/3" in screen.lines[1]
            assert not any("…" in line for line in screen.lines)
        console.stage("checking")
        assert "checking …" in screen.lines[1]
    assert screen.lines == ["packing the model"]


def test_a_log_has_nothing_of_a_brief_bar(capsys: pytest.CaptureFixture[str]) -> None:
    for brief in (True, False):
        with console.progress("packing", 2, "layers", brief=brief) as bar:
            bar.advance(2)
        assert bool(capsys.readouterr().err) != brief


def test_ctrl_c_while_loading_leaves_nothing(terminal: Terminal) -> None:
    screen = terminal(60)
    with pytest.raises(KeyboardInterrupt), console.stages("loading"):
        raise KeyboardInterrupt
    assert screen.lines == []
    assert sys.stderr is screen


def test_a_log_file_gets_no_spinner(capsys: pytest.CaptureFixture[str]) -> None:
    with console.stages("loading"):
        console.stage("reading")
    assert capsys.readouterr().err == ""


def test_loading_says_what_it_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(console, "stage", said.append)
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))  # nothing is remembered
    folder = tmp_path / "model"
    base = medusa_kit.load("debug-tiny", heads=None, device="cpu").base
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    said.clear()
    medusa_kit.load(str(folder), heads="untrained", device="cpu")
    assert said[0] == "reading the model"
    assert "checking drafting against plain decoding" in said


def test_the_first_stage_is_shown_before_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "from medusa_kit import cli, console\n"
        "def stages(first, prompt):\n"
        "    print(first, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
        "    raise SystemExit\n"
        "console.stages = stages\n"
        "sys.argv = ['medusa-kit', 'chat', '-m', 'debug-tiny']\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.stdout, done.returncode) == ("loading the libraries []\n", 0), done.stderr


def test_ctrl_c_while_the_commands_are_imported_leaves_no_traceback() -> None:
    code = (
        "import runpy, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'medusa_kit.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "runpy.run_module('medusa_kit', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.stderr, done.stdout, done.returncode) == ("interrupted\n", "", 130)


def test_notes_break_between_words_on_a_terminal(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path stays whole, so that it can be copied; a log gets the line as it is."""
    text = f"wrote it to /{'x' * 30}/heads and went on"
    console.note(text)
    assert capsys.readouterr().err == f"{text}\n"
    screen = terminal(20)
    written = list[str]()
    screen.write = written.append
    console.note(text)
    lines = "".join(written).splitlines()
    assert lines[0].endswith("wrote it to")
    assert f"/{'x' * 30}/heads" in lines[1]


def test_work_that_ends_at_once_took_the_time_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *[480.0] * 48])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pace = console._Pace(0)
    for _ in range(48):
        pace.advance(1)
    assert (pace.done, pace.per_second) == (48.0, 0.1)
