"""Heads that learn on a CUDA device learn what they learn on the CPU. The device is a stand-in."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_stand_in import Device, Wait

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.data.chat import EncodedExample
from medusa_kit.heads import load_heads
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.features import features
from medusa_kit.train.trainer import train_heads

CASES: list[dict[str, Any]] = [
    {"heads": {"num_heads": 2}},
    {"heads": {"num_heads": 2, "kind": "hydra"}, "train": {"features": "live"}},
    {"heads": {"num_heads": 2, "kind": "recurrent"},
     "train": {"loss": "soft", "soft_share": 0.5, "soft_top": 8}},
]  # fmt: skip


class Runs:
    """Training runs of one recipe, each in a folder of its own."""

    def __init__(self, folder: Path, rows: list[EncodedExample], make: Any, base: Any) -> None:
        self._folder, self._rows, self._make, self._base = folder, rows, make, base

    def on(self, device: str, **sections: Any) -> dict[str, torch.Tensor]:
        base: BaseModel = self._base()
        base = wrap_model(base.model.to(device))
        train = {"epochs": 2, **sections.pop("train", {})}
        recipe: TrainRecipe = self._make(
            output_dir=str(self._folder / device), train=train, **sections
        )
        report = train_heads(base, self._rows, recipe)
        self.updates = report.num_updates
        return load_heads(report.heads_folder, self._base()).state_dict()


@pytest.fixture
def runs(
    tmp_path: Path,
    counting_rows: Callable[[], list[EncodedExample]],
    make_recipe: Any,
    tiny_base: Any,
) -> Runs:
    return Runs(tmp_path, counting_rows(), make_recipe, tiny_base)


@pytest.mark.parametrize("sections", CASES, ids=str)
def test_the_device_teaches_what_the_cpu_teaches(
    runs: Runs, cuda_stand_in: Device, sections: dict[str, Any]
) -> None:
    here = runs.on("cpu", **sections)
    assert cuda_stand_in.counts.launches.total() == 0
    there = runs.on("cuda", **sections)
    assert cuda_stand_in.counts.launches.total() > 0
    assert here.keys() == there.keys()
    for name, weight in here.items():
        torch.testing.assert_close(there[name], weight, rtol=1e-3, atol=1e-4)


def test_hidden_states_lie_on_the_host_where_the_device_is_full(
    runs: Runs,
    cuda_stand_in: Device,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(features, "WORTH_A_WORD", 0)  # else nothing is said of so few
    sections: dict[str, Any] = {"heads": {"num_heads": 2}, "train": {"epochs": 1}}
    there = runs.on("cuda", **sections)
    assert "in GPU memory" in capsys.readouterr().err
    cuda_stand_in.memory.free = 1000
    (runs._folder / "cuda").rename(runs._folder / "with room")
    full = runs.on("cuda", **sections)
    assert "in host memory" in capsys.readouterr().err
    for name, weight in there.items():
        torch.testing.assert_close(full[name], weight)


def test_an_update_waits_for_the_device_once(runs: Runs, cuda_stand_in: Device) -> None:
    """For its losses, which tell whether its gradients are numbers."""

    def waits(epochs: int) -> Counter[Wait]:
        before = cuda_stand_in.counts.waits_by_place()
        runs.on(
            "cuda",
            heads={"num_heads": 2},
            train={"epochs": epochs, "eval_every": 999, "save_every": 999},
        )
        (runs._folder / "cuda").rename(runs._folder / f"{epochs} epochs")
        return cuda_stand_in.counts.waits_by_place() - before

    few, updates = waits(1), runs.updates
    more = waits(3) - few  # what does not depend on updates is the same
    updates = runs.updates - updates
    copies = Counter[str]()
    for wait, times in more.items():
        copies[wait.what] += times
    assert copies["a copy to the host"] == updates, more
    assert copies["a copy to the device"] <= 2, more  # an epoch's order
    assert len(copies) <= 2, more
