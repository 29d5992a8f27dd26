"""Matrix products of a training run: float32 by oneDNN where that is as accurate, and only in the
run; or in 16 bits, near those in float32."""

import json

import pytest
import torch

from medusa_kit.errors import ConfigError
from medusa_kit.train import cpu_products, loop
from medusa_kit.train.cpu_products import ALLOWED, by_onednn, error_of_products
from medusa_kit.train.loss.loss import LossOptions
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads

CPU = torch.device("cpu")


def test_products_have_the_accuracy_of_float32(monkeypatch):
    assert error_of_products() < ALLOWED
    with by_onednn(CPU):
        assert error_of_products() < ALLOWED
    rounded = torch.ones(1)

    def in_sixteen_bits(self, other):
        return (self.bfloat16() * rounded.bfloat16()).to(self.dtype).matmul(other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", in_sixteen_bits)
    assert error_of_products() > ALLOWED


def test_lower_precision_is_not_allowed_where_the_processor_would_use_it(monkeypatch):
    found = []
    for error, expected in ((0.0, "medium"), (2e-3, "highest")):
        monkeypatch.setattr(cpu_products, "error_of_products", lambda error=error: error)
        with by_onednn(CPU):
            found.append(torch.get_float32_matmul_precision())
        assert found[-1] == expected
        assert torch.get_float32_matmul_precision() == "highest"
    with by_onednn(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "highest"


def test_updates_use_it_and_leave_the_setting_as_it_was(
    tiny_base, counting_rows, make_recipe, monkeypatch
):
    monkeypatch.setattr(cpu_products, "error_of_products", lambda: 0.0)
    seen = set()
    original = loop.TrainingLoop._update

    def update(self, given):
        seen.add(torch.get_float32_matmul_precision())
        if self.step == 3:
            raise KeyboardInterrupt
        original(self, given)

    monkeypatch.setattr(loop.TrainingLoop, "_update", update)
    with pytest.raises(KeyboardInterrupt):
        train_heads(tiny_base(), counting_rows(), make_recipe())
    assert seen == {"medium"}
    assert torch.get_float32_matmul_precision() == "highest"


def losses(recipe):
    lines = (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.parametrize(
    "heads",
    [{"kind": "hydra"}, {"projection": "own"}, {"kind": "recurrent"}],
)
@pytest.mark.parametrize("loss", [{}, {"loss": "soft", "soft_top": 4}])
def test_products_in_16_bits_train_nearly_as_in_float32(
    tiny_base, counting_rows, make_recipe, tmp_path, heads, loss
):
    base, found = tiny_base(), {}
    for precision in ("float32", "bfloat16"):
        recipe = make_recipe(
            output_dir=str(tmp_path / precision), heads=heads,
            train={"log_every": 1, "keep": "last", "precision": precision, **loss},
        )  # fmt: skip
        report = train_heads(base, counting_rows(), recipe)
        assert all(torch.tensor(one).isfinite().all() for one in report.scores.loss)
        found[precision] = losses(recipe)
    assert found["bfloat16"] != found["float32"]  # so they were really computed in 16 bits
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.05)
    assert found["float32"][-1] < found["float32"][0]


def test_only_the_named_precision_is_used():
    with LossOptions(precision="bfloat16").products(torch.device("cpu")):
        assert torch.is_autocast_enabled("cpu")
    with LossOptions().products(torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")


def test_a_base_in_float64_is_refused_before_anything_is_computed(
    tiny_base, counting_rows, make_recipe, monkeypatch
):
    """torch's autocast leaves float64 as it is."""
    base = tiny_base(torch.float64)
    monkeypatch.setattr(base.model, "forward", None)
    with pytest.raises(ConfigError, match=r"'bfloat16' on a base in float64") as caught:
        train_heads(base, counting_rows(), make_recipe(train={"precision": "bfloat16"}))
    assert "train.precision=float32" in caught.value.hint
