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


WRONG: list[tuple[str, Any, str]] = [  # field, value, what is said of it
    ("n", "5", "n '5' is a string; expected an integer\nhint: write it without quotes: 5"),
    ("n", True, "n true is a boolean; expected an integer\nhint: leave it out"),
    ("n", 0, "n 0 is out of range; expected 1 or more\nhint: leave it out"),
    ("stream", "True", "stream 'True' is a string; expected true or false\n"
     "hint: write it without quotes: true"),
    ("stream", 1, "stream 1 is a number; expected true or false\nhint: leave it out"),
    ("temperature", "0.5", "temperature '0.5' is a string; expected a number\n"
     "hint: write it without quotes: 0.5"),
    ("temperature", "hot", "temperature 'hot' is a string; expected a number\nhint: leave it out"),
    ("seed", [1, None], "seed [1, null] is a list; expected an integer\nhint: leave it out"),
    ("user", 5, 'user 5 is a number; expected a string\nhint: write it in quotes: "5"'),
    ("user", "x" * 600, f"user '{'x' * 100}'… has 600 characters; expected 512 at most\n"
     "hint: leave it out"),
    ("model", {}, "model {} is an object; expected a string\nhint: GET /v1/models lists all"),
    ("service_tier", "Fast", "service_tier 'Fast' is unknown; expected 'auto', 'default', 'flex', "
     "'scale', 'priority' or 'fast'\nhint: did you mean fast?"),
    ("logit_bias", {"a": 1}, "logit_bias has the key 'a'; expected token ids, as '42'\n"
     'hint: for instance {"42": -100}'),
    ("metadata", 5, "metadata 5: expected up to 16 pairs of text, with keys of up to 64 characters "
     'and values of up to 512\nhint: for instance {"chat": "5"}'),
    ("stop", [None], 'stop.0 is null; expected a string\nhint: for instance ["\\n"]'),
    ("str", 1, "the field 'str' is unknown; did you mean store?"),
    ("a[0]", 1, "the field 'a[0]' is unknown"),
]  # fmt: skip
WRONG_CHATS: list[tuple[str, Any, str]] = [
    ("messages", "hi", "messages 'hi' is a string; expected a list\n"
     'hint: messages are [{"role": "user", "content": "…"}]'),
    ("messages", [], "messages [] has 0 items; expected at least 1\n"
     'hint: messages are [{"role": "user", "content": "…"}]'),
    ("messages", ["hi"], "messages.0 'hi' is a string; expected an object\n"
     'hint: a message is {"role": "user", "content": "…"}'),
    ("messages", [{"role": "user", "content": 5}], "messages.0.content 5 is a number; expected a "
     'string or a list\nhint: write it in quotes: "5"'),
    ("messages", [{"role": "User", "content": ""}], "messages.0.role 'User' is unknown; expected "
     "'system', 'developer', 'user', 'assistant' or 'tool'\nhint: did you mean user?"),
    ("tool_choice", "x" * 600, f"tool_choice '{'x' * 100}'… has 600 characters; expected 512 at "
     "most\nhint: leave it out"),
    ("tool_choice", 5, "tool_choice 5 is a number; expected a string or an object\n"
     'hint: write it in quotes: "5"'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "said"), WRONG + WRONG_CHATS, ids=lambda value: str(value)[:40]
)
def test_a_wrong_value_is_shown_with_what_was_expected_and_a_hint(
    live: LiveServer, http: httpx.Client, field: str, value: Any, said: str
) -> None:
    chats = (field, value, said) in WRONG_CHATS
    for path, asked in ((CHAT, {"messages": [USER]}), (TEXT, {"prompt": "hi"})):
        if path == CHAT or not chats:
            whole = {"model": live.model, **asked, field: value}
            error = post(http, path, whole).json()["error"]
            assert error["message"] == said
            assert post(http, path, whole, padding=5000).json()["error"] == error
            assert error["param"].split(".")[0] == field.split(".")[0]
            assert "constrained" not in error["param"]


def post(http: httpx.Client, path: str, asked: dict[str, Any], padding: int = 0) -> httpx.Response:
    """With ASCII alone, since httpx cannot write half of a character."""
    headers = {"Content-Type": "application/json"}
    return http.post(path, content=(json.dumps(asked) + " " * padding).encode(), headers=headers)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model"', "no JSON"),
        (b"", "missing"),
        (b"[1]", "the body [1] is a list; expected an object\nhint: for instance {"),
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
