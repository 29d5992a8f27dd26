"""Heads trained on a base whose weights torchao keeps in eight bits."""

import importlib.util

import pytest

from medusa_kit.heads import load_heads
from medusa_kit.train.trainer import train_heads


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="not installed: torchao")
@pytest.mark.parametrize("features", ["memory", "live"])
def test_heads_learn_on_a_base_in_eight_bits(
    tiny_base, counting_rows, make_recipe, tmp_path, features
):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from medusa_kit.base.model import wrap_model

    model = tiny_base().model
    full = wrap_model(model).weights_digest()
    quantize_(model.model, Int8WeightOnlyConfig())
    base = wrap_model(model)
    before = base.weights_digest()
    assert before != full
    recipe = make_recipe(
        output_dir=str(tmp_path / "run"),
        heads={"num_heads": 2},
        train={"epochs": 20, "learning_rate": 0.03, "features": features},
    )
    report = train_heads(base, counting_rows(), recipe)
    assert base.weights_digest() == before
    heads = load_heads(report.heads_folder, base)
    assert heads.config.base_quantized
    assert report.scores.top1[0] > 0.2  # guessing gets 1 in 23
