"""The demo on the debug model, with little work."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checked_once import checked_once  # noqa: F401

from medusa_kit import console
from medusa_kit.demo.__main__ import main
from medusa_kit.demo.work import Work
from medusa_kit.quick import settings

Run = Callable[..., int]


@pytest.fixture(autouse=True, scope="module")
def width() -> Iterator[None]:
    """Of a usual terminal, whatever it is where the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console.out, "_width", 80)
        yield


@pytest.fixture(scope="module")
def run_here() -> Iterator[Run]:
    """Runs it in the working folder; returns the exit code."""
    least: dict[str, Any] = {"model": "debug-tiny", "heads": "untrained", "questions": 6,
                             "new_tokens": 8, "answers": 16, "held_out": 4, "updates": 6,
                             "evaluations": 3, "seconds": 1e6}  # fmt: skip

    def run(**changes: Any) -> int:
        return main(["out"], Work(**{**least, **changes}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "ANSWER_TOKENS", 12)
        patch.setattr(settings, "CPU_POSITIONS", 48)
        patch.setitem(sys.modules, "medusa_kit.tuning.plots", None)  # matplotlib takes a second
        yield run


@pytest.fixture
def demo(run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return run_here
