"""OpenAI's own client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from support.serving.live_server import LiveServer
from support.serving.trip import WEATHER, Trip, get_weather

pytestmark = pytest.mark.embedded

QUESTION: list[Any] = [{"role": "user", "content": "Name a river."}]
TRIP: list[Any] = [{"role": "user", "content": "Two days in Rome, as JSON."}]
ERRORS: dict[int, type[openai.APIStatusError]] = {
    401: openai.AuthenticationError,
    404: openai.NotFoundError,
    429: openai.RateLimitError,
    503: openai.InternalServerError,
}


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    with live.client() as client:
        yield client


@pytest.fixture
def asked(live: LiveServer) -> dict[str, Any]:
    return {"model": live.model, "max_tokens": 40, "temperature": 0}


def test_chats(client: OpenAI, asked: dict[str, Any]) -> None:
    """With every field that only labels a request; streamed and whole."""
    labels: dict[str, Any] = {
        "metadata": {"run": "one"}, "safety_identifier": "me", "prompt_cache_key": "rivers",
        "prompt_cache_retention": "24h", "service_tier": "auto", "store": True, "user": "me",
        "prediction": {"type": "content", "content": "The Nile."}, "verbosity": "medium",
    }  # fmt: skip
    plain = client.chat.completions.create(messages=QUESTION, **asked)
    whole = client.chat.completions.create(messages=QUESTION, **asked, **labels)
    stream = client.chat.completions.create(
        messages=QUESTION, stream=True,
        stream_options={"include_usage": True, "include_obfuscation": True}, **asked, **labels,
    )  # fmt: skip
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content == plain.choices[0].message.content
    assert (last.choices, last.usage and last.usage.prompt_tokens) == (
        [], whole.usage and whole.usage.prompt_tokens
    )  # fmt: skip
    assert whole.system_fingerprint == last.system_fingerprint
    assert (whole.service_tier, plain.service_tier) == ("default", None)


def test_completions(client: OpenAI, asked: dict[str, Any]) -> None:
    answer = client.completions.create(prompt="Once upon", logprobs=2, **asked)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert "".join(scores.tokens or ()) == answer.choices[0].text


def test_tools_in_a_loop(client: OpenAI, asked: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "Does it rain in Oslo?"}]
    first = client.chat.completions.create(
        messages=messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False,
        **asked,
    ).choices[0]  # fmt: skip
    assert first.finish_reason == "tool_calls"
    messages.append(first.message.model_dump())
    for call in first.message.tool_calls or ():
        result = get_weather(**json.loads(call.function.arguments))  # type: ignore[union-attr]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert len(messages) == 3
    last = client.chat.completions.create(messages=messages, tools=[WEATHER], **asked)
    assert last.choices[0].message.content or last.choices[0].message.tool_calls


def test_classes(client: OpenAI, asked: dict[str, Any]) -> None:
    parsed = client.chat.completions.parse(messages=TRIP, response_format=Trip, **asked)
    message = parsed.choices[0].message
    assert isinstance(message.parsed, Trip)
    again = [*TRIP, message.model_dump(warnings=False), *TRIP]
    client.chat.completions.parse(messages=again, response_format=Trip, **asked)
    with client.chat.completions.stream(messages=TRIP, response_format=Trip, **asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed


def test_json(client: OpenAI, asked: dict[str, Any]) -> None:
    asked |= {"response_format": {"type": "json_object"}, "stop": ["}", ","]}
    (choice,) = client.chat.completions.create(messages=TRIP, **asked).choices
    assert (choice.message.content or "").lstrip().startswith("{")


def test_log_probabilities(client: OpenAI, asked: dict[str, Any]) -> None:
    (choice,) = client.chat.completions.create(
        messages=QUESTION, logprobs=True, top_logprobs=3, **asked
    ).choices
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert "".join(one.token for one in tokens) == choice.message.content
    for one in tokens:
        assert one.logprob == max(other.logprob for other in one.top_logprobs)
        assert len(one.top_logprobs) == 3


@pytest.mark.usefixtures("ends_early")
def test_a_stream_that_is_left(
    client: OpenAI, asked: dict[str, Any], endless: dict[str, Any]
) -> None:
    stream = client.chat.completions.create(messages=QUESTION, stream=True, **asked | endless)
    for _ in range(3):  # the first says who speaks
        next(stream)
    stream.close()


def test_models(client: OpenAI, live: LiveServer) -> None:
    assert client.models.list().data[0].id == client.models.retrieve(live.model).id == live.model


def test_refusals(refusing: tuple[int, str, str]) -> None:
    status, url, model = refusing
    with (
        OpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(ERRORS[status]) as caught,
    ):
        client.chat.completions.create(model=model, messages=QUESTION)
    assert caught.value.status_code == status
    assert caught.value.type
    assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))


def test_wrong_requests(client: OpenAI, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=QUESTION, verbosity="low", **asked)
    assert caught.value.param == "verbosity"
    long: list[Any] = [{"role": "user", "content": "sea " * 9000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=long, **asked)
    assert caught.value.code == "context_length_exceeded"
