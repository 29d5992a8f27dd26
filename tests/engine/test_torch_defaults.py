"""What a caller has set in torch changes no answer: default device and dtype, modes, autocast.

Kernels in C++ write to tensors by address, so one of another dtype would be overwritten or read as
other numbers.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engines import build_engine, engine_with_heads, random_prompt
from support.tiny_models import tiny_base, tiny_model

import medusa_kit
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import IncompatibleBaseError

ROOT = Path(__file__).parents[2]
PROMPT, TOKENS = random_prompt(11, 3), 8
FLOATS = ("empty", "eye", "linspace", "ones", "rand", "randn", "zeros")  # in the default dtype


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


def light_engine(folder: Path) -> Engine:
    tiny_model("llama-tied").save_pretrained(folder)
    return medusa_kit.load(str(folder), heads=None, device="cpu")


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "light base": light_engine,
    "loaded": lambda _: medusa_kit.load("debug-tiny", device="cpu"),
    "C++": lambda _: engine_with_heads(tiny_base("llama-tied")),
    "torch": lambda _: engine_with_heads(tiny_base("gpt2")),
    "fixed shapes": lambda _: build_engine(tiny_base("llama-tied"), fixed_shapes="always"),
}


def answers(engine: Engine) -> list[list[int]]:
    options: list[dict[str, Any]] = [
        {"drafter": "none"}, {"drafter": "recycling"}, {"drafter": "suffix"}, {},
        {"temperature": 0.9, "seed": 3, "top_p": 0.9}, {"frequency_penalty": 0.5},
    ]  # fmt: skip
    given = [engine.generate(PROMPT, max_new_tokens=TOKENS, **each) for each in options]
    stream = engine.stream(PROMPT, max_new_tokens=TOKENS) if engine.base.tokenizer else ()
    for _ in stream:
        pass
    return [result.token_ids for result in given]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made", ENGINES)
def test_answers_are_the_same(made: str, mode: str, tmp_path: Path) -> None:
    engine = ENGINES[made](tmp_path)
    expected = answers(engine)
    with MODES[mode]():
        assert answers(engine) == expected
        if made in ("light base", "loaded"):
            again = str(tmp_path) if made == "light base" else "debug-tiny"
            assert answers(medusa_kit.load(again, device="cpu")) == expected
    assert answers(engine) == expected


@pytest.mark.parametrize("mode", MODES)
def test_custom_generate(mode: str) -> None:
    model, ids = tiny_model("llama-tied"), torch.tensor([PROMPT])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}
    expected = model.generate(ids, **given)
    with MODES[mode]():
        answer = model.generate(ids, custom_generate=medusa_kit.custom_generate, **given)
    assert torch.equal(answer, expected)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_a_changed_model_is_checked_without_a_callers_autocast(family: str) -> None:
    engine, other = engine_with_heads(tiny_base(family)), tiny_model(family)
    for model in (engine.base.model, other):
        list(model.parameters())[-1].data.mul_(-1.5)
    with torch.autocast("cpu", torch.bfloat16):
        engine.generate(PROMPT, max_new_tokens=2)
        build_engine(wrap_model(tiny_model(family)))
    expected = engine_with_heads(wrap_model(other)).generate(PROMPT, max_new_tokens=TOKENS)
    assert engine.generate(PROMPT, max_new_tokens=TOKENS).token_ids == expected.token_ids


def test_a_model_is_looked_at_without_a_callers_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits in 16 bits would be held to what 16 bits allow."""
    rounded, forward = list[bool](), BaseModel.hidden_and_logits

    def noted(*args: Any, **options: Any) -> Any:
        rounded.append(torch.is_autocast_enabled("cpu"))
        return forward(*args, **options)

    monkeypatch.setattr(BaseModel, "hidden_and_logits", noted)
    with torch.autocast("cpu", torch.bfloat16):
        wrap_model(tiny_model("gpt2"))
    assert rounded
    assert not any(rounded)


def test_a_model_without_numbers_is_refused() -> None:
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_model("llama").config)
    with pytest.raises(IncompatibleBaseError, match="on the meta device: they have no numbers"):
        wrap_model(model)


@pytest.mark.slow
def test_new_tensors_of_floats_name_their_dtype() -> None:
    unnamed = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in (ROOT / "medusa_kit").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in [f"torch.{name}" for name in FLOATS]
        and not {"dtype", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert not unnamed, "their dtype is a caller's torch.set_default_dtype"
