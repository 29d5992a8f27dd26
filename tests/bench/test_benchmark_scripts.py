"""Scripts of benchmarks/ say in a line what they lack."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def call(name: str, *arguments: str) -> None:
        monkeypatch.syspath_prepend(SCRIPTS)
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.chdir(tmp_path)
        importlib.import_module(name).main()

    return call


def test_a_chart_without_figures(run: Any) -> None:
    with pytest.raises(SystemExit, match=r"no figures at .*; run this without --draw-only first"):
        run("llama_cpp", "--draw-only")


def test_a_recording_without_pyte(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fcntl")
    monkeypatch.setitem(sys.modules, "pyte", None)
    with pytest.raises(SystemExit) as leaving:
        run("record_chat", "--help")
    assert leaving.value.code == 0
    assert "Record a real chat" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="`make recording` installs it"):
        run("record_chat", "chat.svg")
