"""The demo on the debug model, with little work."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checked_once import checked_once  # noqa: F401

from medusa_kit import console
from medusa_kit.demo.__main__ import main
from medusa_kit.demo.work import Work
from medusa_kit.quick import settings

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a usual terminal, whatever it is where the tests run."""
    monkeypatch.setattr(console.out, "_width", 80)


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs it in an empty working folder; returns the exit code."""
    monkeypatch.setattr(settings, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(settings, "CPU_POSITIONS", 48)
    monkeypatch.setitem(sys.modules, "medusa_kit.tuning.plots", None)  # matplotlib takes a second
    monkeypatch.chdir(tmp_path)
    least: dict[str, Any] = {"model": "debug-tiny", "heads": "untrained", "questions": 6,
                             "new_tokens": 8, "answers": 16, "held_out": 4, "updates": 6,
                             "evaluations": 3, "seconds": 1e6}  # fmt: skip

    def run(**changes: Any) -> int:
        return main(["out"], Work(**{**least, **changes}))

    return run
