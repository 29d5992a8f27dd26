"""Quick runs on the debug model, with a clock that moves only when it is told to."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checked_once import checked_once  # noqa: F401

from medusa_kit.quick import search, settings
from medusa_kit.quick.session import Request


class Clock:
    """Seconds by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, updates and trees of a size for tests."""
    monkeypatch.setattr(settings, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(settings, "CPU_POSITIONS", 48)
    monkeypatch.setattr(settings, "EVAL_FRACTION", 0.2)
    monkeypatch.setattr(settings, "HEADS", {"kind": "hydra", "num_heads": 2, "num_blocks": 1})
    monkeypatch.setattr(settings, "PLAIN_HEADS", {"kind": "medusa", "num_heads": 2})
    monkeypatch.setattr(search, "CHOICES", (((1, 2, 4), False),))
    monkeypatch.setattr(search, "REPORTED", (2, 4))
    monkeypatch.setitem(sys.modules, "medusa_kit.tuning.plots", None)  # matplotlib takes a second


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Count from {i} to {i * i}.\n" for i in range(30)))
    return path


@pytest.fixture
def request_for(tmp_path: Path, prompt_file: Path, clock: Clock) -> Callable[..., Request]:
    def build(folder: str = "heads", **changes: Any) -> Request:
        arguments = {"model": "debug-tiny", "prompts": str(prompt_file), "hours": 0.01,
                     "output": tmp_path / folder, "device": "cpu", "clock": clock}  # fmt: skip
        return Request(**{**arguments, **changes})

    return build
