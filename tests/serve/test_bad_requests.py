"""What cannot be answered gets OpenAI's form of error, names the field, and harms nobody."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.debug_model import NO_SYSTEM
from support.serving.live_server import LiveServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


def suffix(**options: Any) -> dict[str, Any]:
    return {"medusa_kit": {"drafter": "suffix", "drafter_options": options}}


def schema(**said: Any) -> dict[str, Any]:
    one = {"name": "one", "schema": said, "strict": True}
    asked = {"type": "json_schema", "json_schema": one}
    return {"response_format": asked}


def function(**said: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **said}}


SCHEMA = "response_format.json_schema.schema"
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "no JSON"}}
# (fields, the field to blame, a part of the message)
BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"foo": 1}, "foo", "unknown"),
    ({"max_token": 1}, "max_token", "did you mean max_tokens?"),
    ({"echo": True}, "echo", "not supported"),
    ({"temperature": "1"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "0, or 1e-20 to 1e+20"),
    ({"temperature": 1e-40}, "temperature", "0, or 1e-20 to 1e+20"),  # logits would be infinite
    ({"temperature": 1e39}, "temperature", "0, or 1e-20 to 1e+20"),  # forbidden ones NaN
    ({"repetition_penalty": 1e-40}, "repetition_penalty", "1e-20 to 1e+20"),
    ({"top_p": -0.1}, "top_p", "above 0"),
    ({"top_k": -5}, "top_k", "1 or more"),
    ({"frequency_penalty": 3}, "frequency_penalty", "-2 to 2"),
    ({"logit_bias": {"5": 1000}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 100, "05": -100}}, "logit_bias", "token ids"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
    ({"stop": ""}, "stop.0", "at least 1"),
    ({"stop": ["\ud800"]}, "stop", "half of a character"),
    ({"n": 0}, "n", "1"),
    ({"n": True}, "n", "integer"),
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_tokens": 5.5}, "max_tokens", "integer"),
    ({"max_tokens": 10**6}, None, "the model's context holds"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    ({"model": "other"}, "model", "is not served here"),
    ({"model": "lively:other"}, "model", "no heads 'other' here"),
    ({"adapter_source": "hub"}, "adapter_source", "without an adapter_id"),
    ({"medusa_kit": {"drafter": "nobody"}}, "medusa_kit", "nobody"),
    (suffix(store="x"), "medusa_kit", "store"),
    (suffix(num_nodes=999), "medusa_kit", "64"),
    ({"medusa_kit": {"colour": 1}}, "medusa_kit.colour", "unknown"),
]  # fmt: skip
BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "user"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0.tool_calls", "assistant's"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}]},
     "messages.0.tool_calls.0.id", "string"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "role tool"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
     "messages.0.tool_call_id", "no earlier call"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "expected an object"),
    ({"tools": {}}, "tools", "list"),
    ({"tools": [function(strict="yes")]}, "tools[0].function.strict", "true or false"),
    ({"tools": [function(description=5)]}, "tools[0].function.description", "text"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format", "'x' is unknown"),
    (schema(type="integer", minimum=5, maximum=4), SCHEMA, "cannot be used"),
    (schema(type="colour"), SCHEMA, "cannot be used"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages.0.content.0.type", "decodes text only"),
    ({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "Hear:"},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}]}]},
     "messages.0.content.1.type", "'input_audio', and this server decodes text only"),
    ({"messages": [{"role": "user", "content": [{"type": 5, "text": "x"}]}]},
     "messages.0.content.0.type", "expected 'text'"),
    ({"messages": [{"role": "user", "content": "a" * 9000}]}, None, "context"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "same"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
]  # fmt: skip
BAD_TEXTS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": ""}, "prompt", "no token"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": [99999]}, "prompt", "99999"),
    ({"prompt": ["a", 5]}, "prompt", "list of either"),
    ({"prompt": "a", "tools": [CALL]}, "tools", "not supported"),
    (
        {"prompt": "a", "response_format": {"type": "json_object"}},
        "response_format",
        "not supported",
    ),
]


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with live.http() as client:
        yield client


def check(answer: httpx.Response, param: str | None, said: str) -> None:
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), error
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(("fields", "param", "said"), BAD, ids=lambda value: str(value)[:40])
def test_fields_of_both_kinds(
    live: LiveServer, http: httpx.Client, fields: dict[str, Any], param: str | None, said: str
) -> None:
    both = {"model": live.model, **fields}
    for path, asked in ((CHAT, {"messages": [USER]}), (TEXT, {"prompt": "hi"})):
        check(post(http, path, {**asked, **both}), param, said)


@pytest.mark.parametrize(("fields", "param", "said"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_chats(
    live: LiveServer, http: httpx.Client, fields: dict[str, Any], param: str | None, said: str
) -> None:
    check(post(http, CHAT, {"model": live.model, "messages": [USER], **fields}), param, said)


@pytest.mark.parametrize(("fields", "param", "said"), BAD_TEXTS, ids=lambda value: str(value)[:40])
def test_texts(
    live: LiveServer, http: httpx.Client, fields: dict[str, Any], param: str | None, said: str
) -> None:
    check(post(http, TEXT, {"model": live.model, **fields}), param, said)


def post(http: httpx.Client, path: str, asked: dict[str, Any]) -> httpx.Response:
    """With ASCII alone, since httpx cannot write half of a character."""
    headers = {"Content-Type": "application/json"}
    return http.post(path, content=json.dumps(asked).encode(), headers=headers)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model"', "no JSON"),
        (b"", "missing"),
        (b"[1]", "valid dictionary"),
        (b'{"model": "x", "prompt": "a", "temperature": NaN}', "finite"),
        (b'{"model": "x", "prompt": "a", "temperature": 1e999}', "finite"),
        (b'{"model": "x", "prompt": ' + b"[" * 100_000, "nested"),
        (b'{"model": "x", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "too many to be read"),
        (b'\xff\xfe{"model": "x"}', "body"),
    ],
)
def test_bodies(http: httpx.Client, body: bytes, said: str) -> None:
    answer = http.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_paths_and_methods(http: httpx.Client) -> None:
    for answer, status in ((http.get("/v1/nothing"), 404), (http.get(CHAT), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["type"]


def test_fields_that_ask_for_nothing_are_fine(live: LiveServer, http: httpx.Client) -> None:
    """Clients send defaults and nulls, and messages as they got them."""
    asked = {
        "model": live.model, "max_tokens": 1, "temperature": 0, "top_p": 0.5, "top_k": -1,
        "tools": None, "response_format": {"type": "text"}, "stop": None, "user": "me",
        "messages": [USER, {"role": "assistant", "content": "yes", "refusal": None,
                            "tool_calls": None}, USER],
    }  # fmt: skip
    assert http.post(CHAT, json=asked).status_code == 200


def test_a_role_that_the_template_refuses(
    live: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.service.engine.base.tokenizer, "chat_template", NO_SYSTEM)
    messages = [{"role": "system", "content": "Be brief."}, USER]
    answer = http.post(CHAT, json={"model": live.model, "messages": messages})
    check(answer, "messages", "System role not supported")
