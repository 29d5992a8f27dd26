"""Quick runs on the debug model, with a clock that moves only when it is told to."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quick_runs import Clock, Whole, note_phases, request_in, write_prompts
from support.checked_once import checked_once  # noqa: F401

from medusa_kit.quick import run as quick_run
from medusa_kit.quick import search, settings
from medusa_kit.quick.session import Request


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Answers, updates and trees of a size for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "ANSWER_TOKENS", 12)
        patch.setattr(settings, "CPU_POSITIONS", 48)
        patch.setattr(settings, "EVAL_FRACTION", 0.2)
        patch.setattr(settings, "HEADS", {"kind": "hydra", "num_heads": 2, "num_blocks": 1})
        patch.setattr(settings, "PLAIN_HEADS", {"kind": "medusa", "num_heads": 2})
        patch.setattr(search, "CHOICES", (((1, 2, 4), False),))
        patch.setattr(search, "REPORTED", (2, 4))
        patch.setitem(sys.modules, "medusa_kit.tuning.plots", None)  # matplotlib takes a second
        yield


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    session = quick_run.prepared(request_in(folder, write_prompts(folder), Clock()))
    with pytest.MonkeyPatch.context() as patch:
        begun = note_phases(patch)
        return Whole(session, quick_run.run(session), begun)


@pytest.fixture
def request_for(tmp_path: Path, prompt_file: Path, clock: Clock) -> Callable[..., Request]:
    def build(folder: str = "heads", **changes: Any) -> Request:
        request = request_in(tmp_path, prompt_file, clock)
        return replace(request, **{"output": tmp_path / folder, **changes})

    return build
