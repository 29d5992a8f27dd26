"""Functions of transformers that other code has taken the place of are found, whatever they say of
themselves; what transformers brings along is its own in every family that C++ runs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_models import MODELS, PROMISED, model_of, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaConfig

from medusa_kit.base.own_code import attention_of, functions_of, replaced_function

ROTATE = "apply_rotary_pos_emb"
own = modeling_llama.apply_rotary_pos_emb


def mine(*args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs)


class Called:
    def __call__(self, *args: Any) -> Any:
        return own(*args)


class Norm(modeling_llama.LlamaRMSNorm):
    pass


IN_ITS_PLACE: dict[str, Any] = {
    "a function": mine,
    "with the name of the own one": functools.wraps(own)(mine),
    "decorated by torch": torch.no_grad()(mine),
    "a part of another": functools.partial(mine),
    "an object": Called(),
    "decorated by Python": functools.lru_cache(mine),
}


@pytest.mark.parametrize("way", IN_ITS_PLACE)
def test_functions_in_the_place_of_own_ones(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replaced_function(LlamaConfig()) is None
    monkeypatch.setattr(modeling_llama, ROTATE, IN_ITS_PLACE[way])
    assert replaced_function(LlamaConfig()) == ROTATE


@pytest.mark.parametrize(
    ("owner", "name", "value", "found"),
    [
        (modeling_llama.LlamaMLP, "forward", mine, "LlamaMLP.forward"),
        (modeling_llama, "LlamaRMSNorm", Norm, "LlamaRMSNorm"),
    ],
)
def test_methods_and_classes(
    owner: Any, name: str, value: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    assert replaced_function(LlamaConfig()) == found


def test_attention_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_of("sdpa") is None
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", mine)
    assert replaced_function(LlamaConfig()) == "attention sdpa"
    assert attention_of("sdpa") is mine


@pytest.mark.parametrize("make", [tiny_model, model_of])
def test_every_family_comes_with_its_own(make: Callable[[str], Any]) -> None:
    for name in PROMISED if make is tiny_model else MODELS:
        model = make(name)
        assert replaced_function(model.config) is None
        names = [function for function, _ in functions_of({type(one) for one in model.modules()})]
        assert any(".forward" in function for function in names)


def test_what_nobody_imported_is_as_it_came() -> None:
    assert replaced_function(type("Config", (), {"model_type": "unheard-of"})()) is None
