"""A quick run on the debug model that several tests look at, and what it is made with."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from medusa_kit.quick import run as quick_run
from medusa_kit.quick.session import Request, Session
from medusa_kit.quick.state import PHASES


class Clock:
    """Seconds by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write_prompts(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("".join(f"Count from {i} to {i * i}.\n" for i in range(30)))
    return path


def request_in(folder: Path, prompts: Path, clock: Clock) -> Request:
    return Request("debug-tiny", str(prompts), 0.01, folder / "heads", "cpu", clock=clock)


def note_phases(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of phases, as they begin."""
    names: list[str] = []
    for name in PHASES:
        inner = getattr(quick_run, f"run_{name}")

        def outer(*arguments: Any, name: str = name, inner: Any = inner) -> Any:
            names.append(name)
            return inner(*arguments)

        patch.setattr(quick_run, f"run_{name}", outer)
    return names


@dataclass(frozen=True)
class Whole:
    """A run of `request_for()` that nothing stopped. Tests only read it; they change a copy."""

    session: Session
    verified: dict[str, Any]
    begun: list[str]  # phases

    def copied(self, folder: Path) -> None:
        shutil.copytree(self.session.request.output, folder)
