"""pydantic-ai, by its model for OpenAI's chats."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.serving.live_server import LiveServer
from support.serving.trip import Trip, get_weather

pydantic_ai = pytest.importorskip("pydantic_ai", reason="make test-clients installs it")

from openai import AsyncOpenAI  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

pytestmark = pytest.mark.embedded

Agents = Callable[..., Any]


@pytest.fixture
def agent(url: str, live: LiveServer) -> Agents:
    def agent(url: str = url, model: str = live.model, **options: Any) -> Any:
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        served = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))
        settings = {"temperature": 0, "max_tokens": 40, "parallel_tool_calls": False}
        return pydantic_ai.Agent(served, **{"model_settings": settings, **options})

    return agent


def test_chats(agent: Agents) -> None:
    brief = {"model_settings": {"temperature": 0, "max_tokens": 40}, "instructions": "Be brief."}

    async def streamed() -> str:
        async with agent(**brief).run_stream("Name a river.") as answer:
            return "".join([text async for text in answer.stream_text(delta=True)])

    whole = agent(**brief).run_sync("Name a river.")
    assert asyncio.run(streamed()) == whole.output
    assert whole.usage.output_tokens > 0


def test_tools_in_a_loop(agent: Agents) -> None:
    def settings(run: Any) -> Any:
        choice = ["get_weather"] if run.run_step == 1 else "none"
        return {"temperature": 0, "max_tokens": 60, "tool_choice": choice,
                "parallel_tool_calls": False}  # fmt: skip

    done = agent(tools=[get_weather], model_settings=settings).run_sync("Does it rain in Oslo?")
    parts = [part.part_kind for message in done.all_messages() for part in message.parts]
    assert parts == ["user-prompt", "tool-call", "tool-return", "text"]


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_classes(agent: Agents, output: str) -> None:
    kind = getattr(pydantic_ai, output)(Trip)
    assert isinstance(agent(output_type=kind).run_sync("Two days in Rome.").output, Trip)


def test_log_probabilities(agent: Agents) -> None:
    settings = {"max_tokens": 4, "openai_logprobs": True, "openai_top_logprobs": 2}
    done = agent(model_settings=settings).run_sync("Name a river.")
    tokens = done.all_messages()[-1].provider_details["logprobs"]
    assert "".join(one["token"] for one in tokens) == done.output


@pytest.mark.usefixtures("ends_early")
def test_a_stream_that_is_left(agent: Agents, endless: dict[str, Any]) -> None:
    plain = agent(model_settings=endless)

    async def left() -> None:
        async with plain.run_stream("Tell me a long story.") as answer:
            async for _ in answer.stream_text(delta=True, debounce_by=None):
                break

    asyncio.run(left())


def test_refusals(agent: Agents, refusing: tuple[int, str, str]) -> None:
    status, url, model = refusing
    with pytest.raises(pydantic_ai.ModelHTTPError) as caught:
        agent(url, model, model_settings={}).run_sync("Name a river.")
    assert caught.value.status_code == status
