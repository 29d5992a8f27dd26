"""Layers and weights that a model has twice, has too many of, or shares anew: an answer is that of
the model as it is. The oracle is transformers' own generate on the same model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.models.changes import answer, plain
from support.small_engines import build_engine
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.infer.cpu.binding.kernels import load_library

BY = ["torch", pytest.param("C++", marks=pytest.mark.skipif(
    load_library() is None, reason="no C++ kernels on this machine"))]  # fmt: skip


def made() -> Any:
    model = tiny_model("llama-tied", num_hidden_layers=3)
    model.generation_config.eos_token_id = None
    return model


def share(model: Any, source: int) -> None:
    layers = model.model.layers
    layers[2].mlp.down_proj.weight = layers[source].mlp.down_proj.weight


def append_layer(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a weight shared with another layer": lambda model: share(model, 1),
    "a layer more than the config says": append_layer,
    "a layer less in the config": lambda model: setattr(model.config, "num_hidden_layers", 2),
    "a layer less": lambda model: setattr(model.model, "layers", model.model.layers[:2]),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", CHANGES)
def test_an_answer_is_that_of_the_model_as_it_is(way: str, by: str) -> None:
    model = made()
    share(model, 0)
    options: dict[str, Any] = {"attention": "sdpa"} if by == "torch" else {}
    engine = build_engine(wrap_model(model), **options)
    assert engine.steps_run_by.startswith(by)
    assert answer(engine) == plain(model)
    CHANGES[way](model)
    assert answer(engine) == plain(model)
