"""langchain-openai."""

from collections.abc import Callable
from typing import Any

import pytest
from support.serving.live_server import LiveServer
from support.serving.trip import Trip, get_weather

MISSING = "make test-clients installs it"
langchain = pytest.importorskip("langchain_openai", reason=MISSING)
messages = pytest.importorskip("langchain_core.messages", reason=MISSING)
failures = pytest.importorskip("langchain_core.exceptions", reason=MISSING)

import openai  # noqa: E402

pytestmark = pytest.mark.embedded

Chat = Callable[..., Any]


@pytest.fixture
def chat(url: str, live: LiveServer) -> Chat:
    def chat(**options: Any) -> Any:
        given = {"model": live.model, "base_url": url, "api_key": "none", "max_tokens": 40,
                 "temperature": 0, "max_retries": 0, **options}  # fmt: skip
        return langchain.ChatOpenAI(**given)

    return chat


def test_chats(chat: Chat) -> None:
    whole = chat().invoke("Name a river.")
    streamed = None
    for chunk in chat(stream_usage=True).stream("Name a river."):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.content == whole.content
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert whole.response_metadata["system_fingerprint"].startswith("medusa-kit")
    labelled = chat(metadata={"run": "one"}, service_tier="auto", store=True).invoke(
        "Name a river."
    )
    assert labelled.content == whole.content


def test_tools_in_a_loop(chat: Chat) -> None:
    """Streamed too, and what langchain puts together goes back."""
    strict = {"strict": True, "parallel_tool_calls": False}
    forced = chat().bind_tools([get_weather], tool_choice="any", **strict)
    asked = messages.HumanMessage("Does it rain in Oslo?")
    streamed = None
    for chunk in forced.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    for said in (forced.invoke([asked]), streamed):
        (call,) = said.tool_calls
        result = messages.ToolMessage(
            get_weather(**call["args"]), tool_call_id=call["id"], name=call["name"]
        )
        last = chat().bind_tools([get_weather]).invoke([asked, said, result])
        assert last.content or last.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_classes(chat: Chat, method: str) -> None:
    filled = chat().with_structured_output(Trip, method=method).invoke("Two days in Rome.")
    assert isinstance(filled, Trip)


def test_json(chat: Chat) -> None:
    asked = chat().bind(response_format={"type": "json_object"}, stop=["}", ","])
    assert asked.invoke("A trip as JSON.").content.lstrip().startswith("{")


def test_log_probabilities(chat: Chat) -> None:
    answer = chat().bind(logprobs=True, top_logprobs=2).invoke("Name a river.")
    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in tokens) == answer.content


@pytest.mark.usefixtures("ends_early")
def test_a_stream_that_is_left(chat: Chat, endless: dict[str, Any]) -> None:
    stream = chat(**endless).stream("Tell me a story.")
    for _ in range(3):  # the first says who speaks
        next(stream)
    stream.close()


def test_refusals(chat: Chat, refusing: tuple[int, str, str]) -> None:
    status, url, model = refusing
    with pytest.raises(openai.APIStatusError) as caught:
        chat(base_url=url, model=model).invoke("Name a river.")
    assert caught.value.status_code == status


def test_a_prompt_that_is_too_long(chat: Chat) -> None:
    with pytest.raises(failures.ContextOverflowError):
        chat().invoke("sea " * 9000)


def test_a_name_that_the_template_has_no_use_for(chat: Chat) -> None:
    named, unnamed = (chat().invoke([messages.HumanMessage("Who am I?", **given)])
                      for given in ({"name": "ann"}, {}))  # fmt: skip
    assert named.content == unnamed.content
    assert named.usage_metadata["input_tokens"] == unnamed.usage_metadata["input_tokens"]
