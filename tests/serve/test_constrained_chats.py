"""response_format and tools by OpenAI's own client: answers are those of transformers' own generate
under llguidance's masks, whether they are streamed or not, and calls are read from them."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel
from support.callers import all_at_once
from support.serving.grammars import STOPS, plain_under, tokenizer, writing_base
from support.serving.grammars import plain as unbound
from support.serving.live_server import LiveServer, live_server
from support.small_engines import engine_with_heads

from medusa_kit.errors import MedusaKitError
from medusa_kit.infer.decode.accept.grammar import GrammarMask
from medusa_kit.serve.calls.tools import constraint_of

TOKENS = 120
QUESTION: list[Any] = [{"role": "user", "content": "The weather in Oslo?"}]
PLACE = {"type": "string", "enum": ["Oslo", "Rome", "Orlando"]}
SCHEMA = {
    "type": "object", "required": ["place", "tags"], "additionalProperties": False,
    "properties": {"place": PLACE, "tags": {"type": "array", "items": PLACE, "maxItems": 2}},
    "x-guidance": {"whitespace_pattern": " ?"},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("weather", "tides")
]
NAMED = {"type": "function", "function": {"name": "tides"}}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server(engine_with_heads(writing_base(context=4096)), max_rows=4) as server:
        yield server


def ask(client: OpenAI, stream: bool, **asked: Any) -> tuple[Any, str, list[int]]:
    """(message, why it ended, token ids) as OpenAI's client puts a stream together itself."""
    asked = {"model": "writing", "messages": QUESTION, "max_tokens": TOKENS, "temperature": 0,
             "extra_body": {"return_token_ids": True}, **asked}  # fmt: skip
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        return choice.message, choice.finish_reason, choice.model_extra["token_ids"]
    ids = []
    with client.chat.completions.stream(**asked) as events:
        try:
            for event in events:
                if event.type == "chunk":
                    ids += (event.chunk.choices[0].model_extra or {}).get("token_ids", [])
            (choice,) = events.get_final_completion().choices
        except openai.LengthFinishReasonError as cut:
            (choice,) = cut.completion.choices
    return choice.message, choice.finish_reason, ids


def plain(**fields: Any) -> list[int]:
    constraint = constraint_of(**fields)
    prompt = constraint.encode(tokenizer(), QUESTION)
    return [t for t in plain_under(constraint.grammar, prompt, TOKENS) if t not in STOPS]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("drafter", ["medusa", "suffix", "none"])
def test_a_schema(client: OpenAI, stream: bool, drafter: str) -> None:
    more = {"return_token_ids": True, "medusa_kit": {"drafter": drafter}}
    message, reason, ids = ask(client, stream, response_format=FORMAT, extra_body=more)
    assert ids == plain(response_format=FORMAT)
    assert reason == "stop"
    assert set(json.loads(message.content)) == {"place", "tags"}
    assert not message.tool_calls


def test_a_class_of_pydantic(client: OpenAI) -> None:
    class Weather(BaseModel):
        place: Literal["Oslo", "Rome"]
        sunny: bool

    answer = client.chat.completions.parse(
        model="writing", messages=QUESTION, response_format=Weather, max_tokens=TOKENS,
        temperature=1, seed=3,
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_white_space_can_be_forbidden(client: OpenAI) -> None:
    tight = {**SCHEMA, "x-guidance": {"whitespace_pattern": ""}}
    asked = {"type": "json_schema", "json_schema": {"name": "weather", "schema": tight}}
    message, _, _ = ask(client, False, response_format=asked, temperature=2.0, seed=2)
    assert message.content == json.dumps(json.loads(message.content), separators=(",", ":"))


def test_any_object(client: OpenAI) -> None:
    message, _, ids = ask(client, False, response_format={"type": "json_object"}, max_tokens=20)
    assert message.content.startswith("{")
    assert ids == plain(response_format={"type": "json_object"})[:20]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [("required", False, {"weather", "tides"}), (NAMED, None, {"tides"})],
)
def test_calls(
    client: OpenAI, stream: bool, choice: Any, parallel: bool | None, names: set[str]
) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice}
    if parallel is not None:
        asked["parallel_tool_calls"] = parallel
    message, reason, ids = ask(client, stream, **asked)
    assert ids == plain(**asked)
    assert reason == "tool_calls"
    assert message.content is None or (stream and message.content == "")
    (call,) = message.tool_calls
    assert call.function.name in names
    assert set(json.loads(call.function.arguments)) == {"place", "tags"}
    assert call.type == "function"
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    said = [*QUESTION, message, result]
    then, reason, _ = ask(client, stream, messages=said, tools=TOOLS, tool_choice="none")
    assert not then.tool_calls
    assert then.content


@pytest.mark.parametrize("stream", [False, True])
def test_several_calls(client: OpenAI, stream: bool) -> None:
    message, reason, _ = ask(client, stream, tools=TOOLS, tool_choice="required",
                               max_tokens=400, temperature=1.5, seed=1)  # fmt: skip
    assert reason == "tool_calls"
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls) > 1
    for call in message.tool_calls:
        assert set(json.loads(call.function.arguments)) == {"place", "tags"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_may_call_may_also_speak(client: OpenAI, stream: bool) -> None:
    """As it would without a grammar."""
    message, reason, ids = ask(client, stream, tools=TOOLS, max_tokens=30)
    assert ids == unbound(constraint_of(tools=TOOLS).encode(tokenizer(), QUESTION), 30)
    assert message.content == tokenizer().decode(ids, skip_special_tokens=True).rstrip()
    assert not message.tool_calls
    assert reason == "length"


def test_a_call_that_is_cut_is_told_as_cut(client: OpenAI) -> None:
    message, reason, _ = ask(client, False, tools=TOOLS, tool_choice=NAMED, max_tokens=50)
    assert reason == "length"
    (call,) = message.tool_calls
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(call.function.arguments)


def test_constrained_and_free_answers_share_a_batch(live: LiveServer) -> None:
    asks: list[dict[str, Any]] = [
        {"response_format": FORMAT}, {}, {"tools": TOOLS, "tool_choice": NAMED},
        {"response_format": FORMAT, "temperature": 1.0, "seed": 5},
    ]  # fmt: skip
    with live.client() as client:
        alone = [ask(client, False, **one)[2] for one in asks]

    def together(number: int) -> list[int]:
        with live.client() as client:
            return ask(client, bool(number % 2), **asks[number])[2]

    assert all_at_once(together, len(asks)) == alone


def test_a_grammar_that_the_base_cannot_follow_names_the_field(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or where a limit of llguidance is met: such an answer fails alone."""

    def limit(_: GrammarMask) -> bytes:
        raise MedusaKitError("the grammar could not be followed after 3 tokens: too many states")

    with monkeypatch.context() as patched:
        patched.setattr(GrammarMask, "_bits", limit)
        for asked, field in (
            ({"response_format": FORMAT}, "response_format"),
            ({"tools": TOOLS, "tool_choice": NAMED}, "tools"),
        ):
            with pytest.raises(openai.BadRequestError, match="too many states") as caught:
                ask(client, False, **asked)
            assert caught.value.param == field
        assert ask(client, False)[2]
    endless = writing_base()
    monkeypatch.setattr(type(endless), "stop_token_ids", frozenset())
    with live_server(engine_with_heads(endless)) as live, live.client() as other:
        with pytest.raises(openai.BadRequestError, match="without a stop token") as caught:
            ask(other, False, response_format=FORMAT)
        assert caught.value.param == "response_format"
