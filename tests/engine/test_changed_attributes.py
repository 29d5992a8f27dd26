"""Functions, containers and other values among a module's attributes, and the settings of peft's
layers. The oracle is transformers' own generate on a model that was changed alike."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.models.changes import PROMPT, answer, layer, made, plain
from support.small_engines import build_engine
from torch.nn import functional as F

from medusa_kit.base.model import wrap_model
from medusa_kit.base.model_state import ModelState
from medusa_kit.errors import IncompatibleBaseError, ModelChangedError
from medusa_kit.infer.cpu.binding.kernels import load_library
from medusa_kit.infer.decode.request import make_request
from medusa_kit.settings.sampling import SamplingParams

BY = ["torch", pytest.param("C++", marks=pytest.mark.skipif(
    load_library() is None, reason="no C++ kernels on this machine"))]  # fmt: skip


class Scaled:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return -2 * F.gelu(x)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        return -x


FUNCTIONS = {
    "a builtin": torch.tanh,
    "a partial": partial(F.leaky_relu, negative_slope=-3.0),
    "a lambda": lambda x: -x,
    "an object": Scaled(),
    "a method": Scaled().turned,
    "a function of torch": F.silu,
}


def activation(function: Any) -> Callable[[Any], None]:
    def way(model: Any) -> None:
        for one in model.model.layers:
            one.mlp.act_fn.act = function

    return way


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", FUNCTIONS)
def test_functions_of_modules(way: str, by: str) -> None:
    model, twin = made("gemma3"), made("gemma3")
    options: dict[str, Any] = {"attention": "sdpa"} if by == "torch" else {}
    engine = build_engine(wrap_model(model), **options)
    assert engine.steps_run_by.startswith(by)
    assert answer(engine) == plain(twin)
    for one in (model, twin):
        activation(FUNCTIONS[way])(one)
    assert answer(engine) == plain(twin)
    assert answer(engine) == plain(twin)


@dataclass
class Ring:
    value: float
    next: Any = None


def circles() -> dict[str, Any]:
    """Containers that hold themselves, each with a number in it, and a way of changing it."""
    a_list: list[Any] = [2.5]
    a_dict: dict[str, Any] = {"value": 2.5}
    ring = Ring(2.5, Ring(1.0))
    a_list.append((a_list, a_dict))
    a_dict["all"] = [a_dict, a_list]
    ring.next.next = ring
    return {
        "a list": (a_list, lambda: a_list.__setitem__(0, 3.5)),
        "a dict": (a_dict, lambda: a_dict.update(value=3.5)),
        "objects": (ring, lambda: setattr(ring.next, "value", 3.5)),
    }


@pytest.mark.parametrize("kind", circles())
def test_a_container_that_holds_itself_is_looked_at_once(kind: str) -> None:
    model, (container, change) = made("gemma3"), circles()[kind]
    model.model.layers[0].container = container
    engine = build_engine(wrap_model(model))
    assert engine.base.model is model
    assert answer(engine) == plain(made("gemma3"))
    number = engine.base.look()
    assert engine.base.look() == number
    change()
    assert engine.base.look() > number


@pytest.mark.parametrize("config", [None, {}, "llama"])
def test_a_model_without_its_config_is_refused_in_words(config: Any) -> None:
    """Before it is wrapped, between two answers, and amid one."""
    model = made("gemma3")
    engine, own = build_engine(wrap_model(model)), model.config

    def take(*_: Any) -> None:
        model.config = config

    refused = pytest.raises(IncompatibleBaseError, match=r"config is .*; expected one of tra")
    expected = answer(engine)
    take()
    with refused:
        wrap_model(model)
    with refused:
        answer(engine)
    model.config = own
    assert answer(engine) == expected
    hook = model.model.layers[0].register_forward_hook(take)
    with refused:
        answer(engine)
    hook.remove()
    model.config = own
    assert answer(engine) == expected


@pytest.mark.skipif(load_library() is None, reason="no C++ kernels on this machine")
def test_what_a_function_of_other_code_computes_may_change() -> None:
    """It looks like an activation that C++ knows, and says nothing of what it goes by."""
    model, factor = made("gemma3"), [1.0]
    activation(lambda x: factor[0] * F.gelu(x, approximate="tanh"))(model)
    engine = build_engine(wrap_model(model))
    assert answer(engine) == plain(model)
    factor[0] = -2.0
    assert answer(engine) == plain(model)


class Kind(Enum):
    ONE, OTHER = 1, 2


@dataclass
class Options:
    scale: float = 1.0


ATTRIBUTES = {
    "a list": ([1], lambda m: m.given.append(2)),
    "a tuple": ((1, 2), lambda m: setattr(m, "given", (1, 3))),
    "a set": ({1}, lambda m: m.given.add(2)),
    "a dictionary": ({"a": {"b": 1}}, lambda m: m.given["a"].update(b=2)),
    "True for 1": ([1], lambda m: setattr(m, "given", [True])),
    "a dtype": (torch.float32, lambda m: setattr(m, "given", torch.float64)),
    "a number of numpy": (np.float32(1), lambda m: setattr(m, "given", np.float32(2))),
    "an array": (np.zeros(2), lambda m: m.given.__setitem__(0, 1)),
    "a tensor in a list": ([torch.zeros(2)], lambda m: m.given[0].numpy().__setitem__(0, 1)),
    "an enum": (Kind.ONE, lambda m: setattr(m, "given", Kind.OTHER)),
    "a dataclass": (Options(), lambda m: setattr(m.given, "scale", 2.0)),
    "a class": (Options, lambda m: setattr(m, "given", Kind)),
    "words of a partial": (partial(F.gelu, approximate="tanh"),
                           lambda m: m.given.keywords.update(approximate="none")),
}  # fmt: skip


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_each_kind_of_value_is_a_setting(kind: str) -> None:
    model = made("llama-tied")
    value, change = ATTRIBUTES[kind]
    layer(model).mlp.given = copy.deepcopy(value)
    before = ModelState(model, contents=True)
    plain(model)
    assert ModelState(model, contents=True) == before
    change(layer(model).mlp)
    assert ModelState(model, contents=True) != before


def test_a_config_that_only_a_part_of_the_model_has() -> None:
    model = made("llama-tied")
    model.model.config = copy.deepcopy(model.config)
    before = ModelState(model, contents=False)
    model.model.config.num_hidden_layers = 1
    assert ModelState(model, contents=False) != before


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["down_proj", "q_proj"], task_type="CAUSAL_LM")
    adapters = peft.get_peft_model(model, config)
    adapters.add_adapter("other", config)
    for name, parameter in adapters.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.5)
    return adapters.eval()


def rescale(adapters: Any) -> None:
    for module in adapters.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= -3


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "off": lambda adapters: adapters.base_model.disable_adapter_layers(),
    "another": lambda adapters: adapters.set_adapter("other"),
    "another scale": rescale,
    "merged": lambda adapters: adapters.merge_adapter(),
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("way", SWITCHES)
def test_adapters_that_are_switched_within_an_answer(way: str) -> None:
    model = made("llama")
    engine = build_engine(wrap_model(model))
    adapters = adapted(engine.base.model)
    assert answer(engine) == plain(model)  # and no look takes what a forward does for a change
    request = make_request(engine.verifier, PROMPT, SamplingParams(), 20)
    steps = engine.scheduler.run([request], engine.drafter_for("none"))
    next(steps)
    SWITCHES[way](adapters)
    with pytest.raises(ModelChangedError):
        list(steps)
    assert answer(engine) == plain(model)
