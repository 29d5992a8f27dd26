"""float32 products of a training run: by oneDNN where that is as accurate, and only in the run."""

import pytest
import torch

from medusa_kit.train import cpu_products, loop
from medusa_kit.train.cpu_products import ALLOWED, by_onednn, error_of_products
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
