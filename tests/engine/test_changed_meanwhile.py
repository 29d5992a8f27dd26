"""A model that somebody changes while an engine is made for it, or made anew: what was read of it
amid the change says nothing. It is read once more, and where it never stands still the error says
that, whatever failed."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from support.models.changes import answer, change, made, plain
from support.small_engines import build_engine

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.errors import IncompatibleBaseError, ModelChangedError
from medusa_kit.infer import self_check
from medusa_kit.infer.cpu.binding.kernels import load_library

LLAMA = "llama-tied"
BY = [{"attention": "sdpa"}, pytest.param({}, marks=pytest.mark.skipif(
    load_library() is None, reason="no C++ kernels on this machine"))]  # fmt: skip


def other_weights(model: Any) -> None:
    change(model, "by data")


def other_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def fewer_layers(model: Any) -> None:
    """The forward under way comes to an end that a list has no more."""
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1
    raise IndexError("index 2 is out of range")


CHANGES = [other_weights, other_layers, fewer_layers]


def interfere(
    patch: pytest.MonkeyPatch, where: Any, name: str, way: Callable[[], None], times: int = 1
) -> None:
    """Have `way` done amid the first calls of a function."""
    function, left = getattr(where, name), [way] * times

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if left:
            left.pop()()
        return result

    patch.setattr(where, name, meanwhile)


@pytest.mark.parametrize("options", BY)
@pytest.mark.parametrize("way", CHANGES)
def test_amid_the_check_at_load(
    way: Callable[[Any], None], options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(LLAMA)
    interfere(monkeypatch, self_check, "score_random_trees", lambda: way(model))
    assert answer(build_engine(wrap_model(model), **options)) == plain(model)


@pytest.mark.skipif(load_library() is None, reason="no C++ kernels on this machine")
def test_amid_the_check_of_its_cpp_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not refused for good."""
    model, turns = made(LLAMA), list[int]()

    def change_later() -> None:
        turns.append(1)
        if len(turns) == 2:  # the first check is of torch
            other_weights(model)

    interfere(monkeypatch, self_check, "score_random_trees", change_later, 9)
    engine = build_engine(wrap_model(model))
    assert engine.steps_run_by.startswith("C++")
    assert answer(engine) == plain(model)


@pytest.mark.parametrize("options", BY)
@pytest.mark.parametrize("way", CHANGES)
def test_amid_the_check_before_an_answer(
    way: Callable[[Any], None], options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(LLAMA)
    engine = build_engine(wrap_model(model), **options)
    before = answer(engine)
    interfere(monkeypatch, self_check, "score_random_trees", lambda: way(model))
    change(model, "norm")
    with contextlib.suppress(ModelChangedError):  # where it was made anew, of what was before
        assert answer(engine) == plain(model)
    assert answer(engine) == plain(model) != before


@pytest.mark.parametrize("way", CHANGES)
def test_amid_its_description(way: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(LLAMA)
    interfere(monkeypatch, BaseModel, "hidden_and_logits", lambda: way(model))
    assert answer(build_engine(wrap_model(model))) == plain(model)


@pytest.mark.parametrize("when", ["at load", "before an answer"])
def test_a_model_that_never_stands_still(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(LLAMA)
    base = wrap_model(model)
    engine = None if when == "at load" else build_engine(base)
    turns = list[int]()

    def change_and_fail() -> None:
        turns.append(len(turns))
        other_weights(model)
        raise IndexError(f"index {len(turns)} is out of range")

    with monkeypatch.context() as patch:
        interfere(patch, self_check, "score_random_trees", change_and_fail, 99)
        other_weights(model)
        with pytest.raises(ModelChangedError, match="while it was looked at"):
            build_engine(base) if engine is None else answer(engine)
    assert len(turns) < 9
    assert answer(engine or build_engine(base)) == plain(model)


def test_a_model_that_stands_still_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model, turns = made(LLAMA), list[int]()

    def fail() -> None:
        turns.append(1)
        raise KeyError("layer 7")

    interfere(monkeypatch, self_check, "score_random_trees", fail, 99)
    with pytest.raises(IncompatibleBaseError, match="layer 7"):
        build_engine(wrap_model(model), attention="sdpa")
    assert len(turns) <= 2


@pytest.mark.parametrize("family", ["phi3", LLAMA])
def test_a_second_engine_is_of_the_model_as_it_is(family: str) -> None:
    """What the first one packed of its layers is of what they were."""
    model = made(family)
    first = build_engine(wrap_model(model))
    before = answer(first)
    other_weights(model)
    second = build_engine(wrap_model(model))
    assert answer(second) == answer(first) == plain(model) != before
