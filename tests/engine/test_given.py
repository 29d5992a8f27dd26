"""What a caller gives that is no prompt, no stop string and no copy: one error, in words."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_engines import build_engine, random_heads
from support.tiny_models import tiny_base

from medusa_kit.base.model import BaseModel
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.engine.load import load
from medusa_kit.errors import ConfigError, DataError, MedusaKitError, UsageError
from medusa_kit.settings.grammar import Grammar


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(tiny_base("llama"))


@pytest.fixture
def chat(chat_base: BaseModel) -> Engine:
    return build_engine(chat_base)


WRONG: list[Any] = [
    b"hi", bytearray(b"hi"), memoryview(b"hi"), [b"hi"], [[b"hi"]], None, 5, 1.5, {1, 2}, [None],
    [[None]], [1.5], [[[1]]], {"role": "user", "content": "hi"}, object(), str, Path("hi"),
    iter([1]), torch.eye(2).to_sparse(), torch.tensor(1.5), torch.tensor([True]), [1, "a"],
    [{"role": "user", "content": "a"}, "b"], [], [[]],
]  # fmt: skip


@pytest.mark.parametrize("prompt", WRONG, ids=lambda one: type(one).__name__)
def test_what_is_no_prompt(prompt: Any, chat: Engine) -> None:
    with pytest.raises(ConfigError, match=r"expected|there is no prompt|has no token"):
        chat.generate(prompt, max_new_tokens=2)
    with pytest.raises(ConfigError):
        chat.stream(prompt, max_new_tokens=2)


@pytest.mark.parametrize("prompt", [b"hi", bytearray(b"hi"), memoryview(b"hi")])
def test_bytes_are_told_to_be_decoded(prompt: Any, engine: Engine) -> None:
    with pytest.raises(ConfigError, match="expected messages, a string") as failed:
        engine.generate(prompt, max_new_tokens=2)
    assert "decode" in str(failed.value.hint)


def test_any_sequence_of_ids_is_a_prompt(engine: Engine) -> None:
    expected = engine.encode([3, 4, 5])
    for prompt in ((3, 4, 5), range(3, 6)):
        assert engine.encode(prompt) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [b"a", 5, {"a": 1}, [b"a"], [None], "", "a\udcff", ["\ud800"]])
def test_what_is_no_stop_string(stop: Any, chat: Engine) -> None:
    with pytest.raises(ConfigError, match="stop"):
        chat.generate("hi", max_new_tokens=2, stop=stop)


@pytest.mark.parametrize("system", [5, b"a", ["a"]])
def test_what_is_no_system_message(system: Any, chat: Engine) -> None:
    with pytest.raises(ConfigError, match="system"):
        chat.conversation(system)


def test_halves_of_surrogate_pairs_are_told_everywhere(chat: Engine, tmp_path: Path) -> None:
    half, store = "a\ud800", str(tmp_path / "\ud800")
    with chat.shared_batch() as batch:
        calls: list[Callable[[], Any]] = [
            lambda: chat.generate(half),
            lambda: chat.generate([{"role": "user", "content": half}]),
            lambda: chat.conversation(half).send("hi"),
            lambda: chat.conversation().send(half),
            lambda: batch.generate("hi", stop=half),
            lambda: chat.generate("hi", drafter=half),
            lambda: chat.generate("hi", drafter="suffix", drafter_options={"store": store}),
        ]
        for call in calls:
            with pytest.raises((ConfigError, DataError, MedusaKitError)):
                call()


@pytest.mark.parametrize("name", ["model", "draft_model", "heads", "tree"])
def test_half_a_pair_in_a_name_is_told_in_text_that_can_be_written(name: str) -> None:
    with pytest.raises(MedusaKitError, match=r"U\+D800, half of a surrogate pair") as caught:
        load(**{"model": "debug-tiny", "device": "cpu", name: "\ud800"})
    assert str(caught.value).encode()


def test_a_batch_is_given_heads_and_functions(engine: Engine) -> None:
    with engine.shared_batch() as batch:
        with pytest.raises(ConfigError, match="HeadsStore"):
            batch.submit([3, 4], heads=5)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="on_tokens"):
            batch.submit([3, 4], on_tokens=5)  # type: ignore[arg-type]
        assert batch.generate([3, 4], max_new_tokens=2).token_ids


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps,
    "within others": lambda one: copy.deepcopy([{"it": one}]),
}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
def test_what_is_in_use_is_not_copied(how: str, engine: Engine, tmp_path: Path) -> None:
    answer = engine.generate([3, 4], max_new_tokens=3)
    streaming = engine.stream([3, 4], max_new_tokens=3)
    with engine.shared_batch() as batch, HeadsStore(engine, tmp_path) as store:
        under_way = batch.submit([3, 4], max_new_tokens=3)
        things = [
            engine, streaming, batch, engine.scheduler, under_way, under_way.submission, store,
            under_way.submission.request, engine.conversation(), engine.memory,
            engine.drafter_for("suffix"), engine.base, engine.verifier,
            random_heads(engine.base),
        ]  # fmt: skip
        for one in things:
            with pytest.raises(UsageError, match="neither copied nor pickled") as failed:
                COPIES[how](one)
            assert type(one).__name__ in failed.value.message
        assert under_way.result().token_ids == answer.token_ids
    assert "".join(streaming) == answer.text
    assert COPIES[how](answer)


ODD: list[Any] = [
    "", b"x", 0, 2.5, [], {}, object(), 10**5000, np.array([1, 2]), torch.tensor([1, 2]),
    torch.tensor([]), float("nan"), iter([1]),
]  # fmt: skip


@pytest.mark.parametrize("value", ODD, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("name", ["drafter", "n", "choices", "regex"])
def test_odd_values_are_refused_in_words(name: str, value: Any, engine: Engine) -> None:
    """None is taken for a default, holds up the process, or fails in a library."""
    made = {"choices": Grammar.choices, "regex": Grammar.regex}
    make = made.get(name, lambda given: engine.generate([1], max_new_tokens=1, **{name: given}))
    with pytest.raises(ConfigError) as caught:
        make(value)
    assert len(str(caught.value)) < 600
    assert caught.value.hint or name in made
