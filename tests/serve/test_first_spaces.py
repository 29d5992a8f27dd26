"""An answer's first space: it is shown wherever prompt and answer together have it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.serving.live_server import LiveServer, live_server
from support.serving.tagged import tagged_tokenizer
from support.small_engines import build_engine
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    tokenizer = tagged_tokenizer(kind="pieces")
    model = tiny_model("llama", 0, vocab_size=len(tokenizer))
    with live_server(build_engine(wrap_model(model, tokenizer, "pieces"))) as server:
        yield server


@pytest.fixture(params=["▁", "a", "<0x0A>"])
def first(request: pytest.FixtureRequest, live: LiveServer) -> int:
    """The only token of answers."""
    token = live.service.engine.base.tokenizer.convert_tokens_to_ids(request.param)
    assert isinstance(token, int)
    return token


def added(engine: Engine, prompt: list[int], ids: list[int]) -> str:
    tokenizer = engine.base.tokenizer
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    return str(tokenizer.decode([*prompt, *ids], skip_special_tokens=True)[len(before) :])


@pytest.mark.parametrize("prompt", ["Hello", MESSAGES])
@pytest.mark.parametrize("stop", [None, "  a", "never"])
def test_in_python(live: LiveServer, first: int, prompt: Any, stop: str | None) -> None:
    engine = live.service.engine
    asked: dict[str, Any] = {"max_new_tokens": 3, "logit_bias": {first: 100.0}, "stop": stop}
    result = engine.generate(prompt, **asked)
    assert result.text == added(engine, engine.encode(prompt), result.token_ids) != ""
    assert "".join(engine.stream(prompt, **asked)) == result.text
    answer = live.service.batch.submit(prompt, **asked)
    assert "".join(answer.stream()) == answer.result().text == result.text
    if isinstance(prompt, list):
        chat = engine.conversation()
        assert chat.send("Hello", **asked).text == result.text


def test_a_stop_string_of_the_space_alone(live: LiveServer) -> None:
    space = live.service.engine.base.tokenizer.convert_tokens_to_ids("▁")
    asked: dict[str, Any] = {"max_new_tokens": 3, "logit_bias": {space: 100.0}, "stop": " "}
    result = live.service.engine.generate("Hello", **asked)
    assert (result.text, len(result.token_ids)) == ("", 1)
    assert "".join(live.service.engine.stream("Hello", **asked)) == ""


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_served(live: LiveServer, first: int, chat: bool, as_ids: bool) -> None:
    """Whole, streamed, several answers; log-probabilities have the same text."""
    engine = live.service.engine
    prompt: Any = MESSAGES if chat else engine.encode("Hello") if as_ids else "Hello"
    asked: dict[str, Any] = {"messages" if chat else "prompt": prompt, "n": 2, "max_tokens": 3,
                             "temperature": 0, "logit_bias": {str(first): 100},
                             "model": live.model, "logprobs": True if chat else 1}  # fmt: skip
    expected = added(engine, engine.encode(prompt), [first] * 3)
    with live.http() as http:
        whole = http.post(CHAT if chat else TEXT, json=asked).json()["choices"]
        unscored = http.post(CHAT if chat else TEXT, json=asked | {"logprobs": None}).json()
        streamed = http.post(CHAT if chat else TEXT, json=asked | {"stream": True}).text
    texts = [_text(choice) for choice in (*whole, *unscored["choices"])]
    assert texts == [expected] * 4
    events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    for index in range(2):
        assert "".join(_text(one) for one in choices if one["index"] == index) == expected
    for choice in whole:
        said = choice["logprobs"]
        names = [one["token"] for one in said["content"]] if chat else said["tokens"]
        assert "".join(names) == expected


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta") or choice
    return str(said.get("content") or said.get("text") or "")
