"""litellm, which also sends what it is given of fields that it does not know."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.serving.live_server import LiveServer
from support.serving.trip import WEATHER, Trip, get_weather

litellm = pytest.importorskip("litellm", reason="make test-clients installs it")

pytestmark = pytest.mark.embedded

QUESTION = [{"role": "user", "content": "Name a river."}]
ERRORS = {
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}

Ask = Callable[..., Any]


@pytest.fixture
def ask(url: str, live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setattr(litellm, "suppress_debug_info", True)

    def ask(messages: Any = QUESTION, **options: Any) -> Any:
        given = {"model": f"openai/{live.model}", "api_base": url, "api_key": "none",
                 "max_tokens": 40, "temperature": 0, "num_retries": 0, **options}  # fmt: skip
        return litellm.completion(messages=messages, **given)

    return ask


def test_chats(ask: Ask, live: LiveServer) -> None:
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    streamed = litellm.stream_chunk_builder(chunks)
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.usage.total_tokens == whole.usage.total_tokens
    other = ask(model=f"hosted_vllm/{live.model}", user="me", metadata={"run": "one"})
    assert other.choices[0].message.content == whole.choices[0].message.content


def test_tools_in_a_loop(ask: Ask) -> None:
    """Messages as litellm's documents have them: its own object, and the tool's name."""
    asked = [{"role": "user", "content": "Does it rain in Oslo?"}]
    first = ask(asked, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    said = first.choices[0].message
    (call,) = said.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    named = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result}
    for given in (said, said.model_dump()):
        last = ask([*asked, given, named], tools=[WEATHER]).choices[0].message
        assert last.content or last.tool_calls


def test_classes(ask: Ask) -> None:
    Trip.model_validate_json(ask(response_format=Trip).choices[0].message.content)


def test_json(ask: Ask) -> None:
    answer = ask(response_format={"type": "json_object"}, stop=["}", ","])
    assert answer.choices[0].message.content.lstrip().startswith("{")


def test_log_probabilities(ask: Ask) -> None:
    (choice,) = ask(logprobs=True, top_logprobs=2).choices
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content


@pytest.mark.usefixtures("ends_early")
def test_a_stream_that_is_left(ask: Ask, endless: dict[str, Any]) -> None:
    stream = ask(stream=True, **endless)
    for _ in range(3):  # the first says who speaks
        next(stream)
    stream.completion_stream.close()


def test_refusals(ask: Ask, refusing: tuple[int, str, str]) -> None:
    status, url, model = refusing
    with pytest.raises(getattr(litellm, ERRORS[status])):
        ask(api_base=url, model=f"openai/{model}")


def test_a_prompt_that_is_too_long(ask: Ask) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask([{"role": "user", "content": "sea " * 9000}])
