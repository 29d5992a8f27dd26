"""Memory that runs out anywhere in training loses no update: the same command goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.full_memory import Full

from medusa_kit.errors import MedusaKitError
from medusa_kit.heads import load_heads
from medusa_kit.train import loop
from medusa_kit.train.engine import PlainEngine
from medusa_kit.train.trainer import train_heads

pytestmark = pytest.mark.usefixtures("often")

FULL: list[Exception] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate"),
    MemoryError(),
]


@contextmanager
def full_at(monkeypatch: pytest.MonkeyPatch, where: str, mode: Full, after: int) -> Iterator[None]:
    owner: Any = loop.TrainingLoop if where == "_judge" else PlainEngine
    original, done = getattr(owner, where), []

    def limited(self: Any, *arguments: Any) -> Any:
        done.append(1)
        if len(done) <= after:
            return original(self, *arguments)
        with mode:
            return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, limited)
        yield


@pytest.fixture
def run(tiny_base: Any, counting_rows: Any, make_recipe: Any, tmp_path: Path) -> Any:
    def build(name: str, **sections: Any) -> Any:
        base = tiny_base()
        recipe = make_recipe(output_dir=str(tmp_path / name), heads={"num_heads": 2}, **sections)
        report = train_heads(base, counting_rows(), recipe)
        return load_heads(report.heads_folder, base).state_dict()

    return build


WHOLE: dict[str, torch.Tensor] = {}


def undisturbed(run: Any) -> dict[str, torch.Tensor]:
    """The weights of the same run with memory enough; trained once."""
    if not WHOLE:
        WHOLE.update(run("two"))
    return WHOLE


@pytest.mark.parametrize(
    ("where", "after", "operation", "error"),
    [("forward", 6, 1, FULL[0]), ("forward", 6, 20, FULL[1]), ("backward", 6, 3, FULL[2]),
     ("update", 6, 2, FULL[0]), ("update", 6, 9, FULL[1]), ("_judge", 2, 4, FULL[2])],
)  # fmt: skip
def test_a_run_goes_on_as_if_nothing_had_been(
    run: Any, monkeypatch: pytest.MonkeyPatch, where: str, after: int, operation: int,
    error: Exception, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    mode = Full(operation, error)
    with (
        full_at(monkeypatch, where, mode, after),
        pytest.raises(MedusaKitError, match="memory is full at update") as caught,
    ):
        run("one")
    assert mode.left == 0
    capsys.readouterr()
    goes_on = run("one")
    noted = capsys.readouterr().err
    # half written weights, and those that would have been judged: the last checkpoint counts
    done = {"update": 4, "_judge": 8}.get(where, 6)
    assert f"continuing from update {done}" in noted
    assert ("resumes after update 6" in (caught.value.hint or "")) == (done == 6)
    whole = undisturbed(run)
    assert all(torch.equal(goes_on[name], tensor) for name, tensor in whole.items())


def test_before_the_first_update_nothing_is_left(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        full_at(monkeypatch, "forward", Full(1, MemoryError()), 0),
        pytest.raises(MedusaKitError, match="memory is full at update 1"),
    ):
        run("one")
    again, whole = run("one"), undisturbed(run)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
