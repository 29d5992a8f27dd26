"""Fields that usual clients send: labels change nothing, what would change the answer does or is
refused by name, and messages come back as they were given."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from openai import OpenAI
from support.debug_model import ASK, FOR_ALL
from support.serving.live_server import LiveServer

from medusa_kit.serve.app import create_app
from medusa_kit.serve.operations import logs
from medusa_kit.serve.service import Service
from medusa_kit.settings.serve import ServeConfig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Why?"}
NAMES = FOR_ALL + "{{ '<|im_start|>' + (m.name or m.role) + '\n' + m.content }}" + ASK
PART = {"type": "text", "text": "Why?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "now"}}

LABELS: list[dict[str, Any]] = [
    {"metadata": {"run": "five", "k" * 64: "v" * 512}},
    {"metadata": {f"key {number}": "" for number in range(16)}},
    {"safety_identifier": "s" * 128},
    {"prompt_cache_key": "tenant"},
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
    {"service_tier": "priority"},
    {"user": "me"},
    {"store": True},
]
LABELS_OF_CHATS: list[dict[str, Any]] = [
    {"prediction": {"type": "content", "content": [PART]}},
    {"verbosity": "medium"},
    {
        "messages": [
            {**USER, "content": [{**PART, "prompt_cache_breakpoint": {"mode": "explicit"}}]}
        ]
    },
    {"messages": [{**USER, "name": None, "annotations": None, "provider_specific_fields": None}]},
    {"top_logprobs": 0},
]
# (fields, the field to blame)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"run": 5}}, "metadata"),
    ({"metadata": "run"}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"safety_identifier": "s" * 129}, "safety_identifier"),
    ({"safety_identifier": 5}, "safety_identifier"),
    ({"prompt_cache_key": ["a"]}, "prompt_cache_key"),
    ({"prompt_cache_key": "k" * 513}, "prompt_cache_key"),
    ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    ({"prompt_cache_options": {"mode": "none"}}, "prompt_cache_options.mode"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"user": 5}, "user"),
    ({"store": "yes"}, "store"),
    ({"verbosity": "low"}, "verbosity"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"moderation": {"model": "any"}}, "moderation"),
    ({"audio": {"voice": "any"}}, "audio"),
    ({"temperature": 0, "top_p": 1.5}, "top_p"),
    ({"top_p": 0, "temperature": -1}, "temperature"),
    ({"top_k": 1, "min_p": 2}, "min_p"),
]
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"messages": [{**USER, "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
     "messages.0.content"),
    ({"messages": [{**USER, "name": "<|im_end|>"}]}, "messages.0.name"),
    ({"messages": [{**USER, "name": ""}]}, "messages.0.name"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]},
                   {"role": "tool", "tool_call_id": "call_1", "content": "12", "name": "later"}]},
     "messages.1.name"),
]  # fmt: skip


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with live.http() as client:
        yield client


def ids_of(http: httpx.Client, live: LiveServer, path: str, **fields: Any) -> list[list[int]]:
    """The answers' own tokens."""
    said = {"messages": [USER]} if path == CHAT else {"prompt": "Why?"}
    asked = {"model": live.model, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = http.post(path, json={**asked, **said, **fields})
    assert answer.status_code == 200, answer.text
    return [one["token_ids"] for one in answer.json()["choices"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_labels_change_nothing(live: LiveServer, http: httpx.Client, path: str) -> None:
    plain = ids_of(http, live, path)
    assert len(plain[0]) > 1
    for fields in LABELS + (LABELS_OF_CHATS if path == CHAT else []):
        assert ids_of(http, live, path, **fields) == plain, fields


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_fields_of_both_kinds(
    live: LiveServer, http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    for path, said in ((CHAT, {"messages": [USER]}), (TEXT, {"prompt": "Why?"})):
        check(http.post(path, json={"model": live.model, **said, **fields}), param)


@pytest.mark.parametrize(("fields", "param"), WRONG_CHATS, ids=lambda value: str(value)[:40])
def test_wrong_fields_of_chats(
    live: LiveServer, http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    check(http.post(CHAT, json={"model": live.model, "messages": [USER], **fields}), param)


def check(answer: httpx.Response, param: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert param.split(".")[-1] in error["message"]
    assert error["type"] == "invalid_request_error"


def test_fields_of_chats_alone(live: LiveServer, http: httpx.Client) -> None:
    hint = {"prediction": {"type": "content", "content": "Why?"}}
    check(http.post(TEXT, json={"model": live.model, "prompt": "a", **hint}), "prediction")


@pytest.mark.parametrize("narrow", [{"top_p": 0}, {"top_p": 0.0}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_draw_from_one_token_is_greedy(
    live: LiveServer, http: httpx.Client, path: str, narrow: dict[str, Any]
) -> None:
    greedy = ids_of(http, live, path)
    drawn = ids_of(http, live, path, temperature=1, seed=5)
    assert drawn != greedy
    assert ids_of(http, live, path, temperature=1.5, seed=5, n=2, **narrow) == greedy * 2


def test_best_of_as_many_as_are_told(live: LiveServer, http: httpx.Client) -> None:
    drawn: dict[str, Any] = {"temperature": 1, "seed": 5, "n": 2}
    assert ids_of(http, live, TEXT, best_of=2, **drawn) == ids_of(http, live, TEXT, **drawn)
    asked = {"model": live.model, "prompt": "a", "n": 2, "best_of": 1}
    check(http.post(TEXT, json=asked), "best_of")


@pytest.mark.parametrize("seed", [-1, 2**64 + 5, 10**30, -(10**30)])
def test_any_seed(live: LiveServer, http: httpx.Client, seed: int) -> None:
    one, other = (ids_of(http, live, CHAT, temperature=1, seed=seed, n=2) for _ in range(2))
    assert one == other
    assert one[0] != one[1]


def test_no_stops(live: LiveServer, http: httpx.Client) -> None:
    for stop in ([], None):
        assert ids_of(http, live, CHAT, stop=stop) == ids_of(http, live, CHAT)


# Messages.


def by_template(live: LiveServer, http: httpx.Client, messages: list[Any]) -> list[list[int]]:
    """The answer to what transformers makes of the messages."""
    tokenizer = live.service.engine.base.tokenizer
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids_of(http, live, TEXT, prompt=prompt)


def test_names_that_the_template_reads(
    live: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.service.engine.base.tokenizer, "chat_template", NAMES)
    named = [
        {"role": "system", "content": "Be brief.", "name": "rules"},
        {"role": "user", "content": "Who am I?", "name": "ann"},
        {"role": "assistant", "content": "Ann.", "name": "bob"},
        {"role": "user", "content": "And I?", "name": "cy"},
    ]
    unnamed = [{**one, "name": None} for one in named]
    told = ids_of(http, live, CHAT, messages=named)
    assert told == by_template(live, http, named)
    assert told != ids_of(http, live, CHAT, messages=unnamed)


def test_a_name_that_a_template_reads_in_other_roles_alone(
    live: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = NAMES.replace("m.name or", "m.role == 'user' and m.name or")
    monkeypatch.setattr(live.service.engine.base.tokenizer, "chat_template", template)
    messages = [
        {**USER, "name": "ann"},
        {"role": "assistant", "content": "So.", "name": "bob"},
        USER,
    ]
    told = ids_of(http, live, CHAT, messages=messages)
    assert told == by_template(live, http, messages)
    del messages[1]["name"]
    assert told == ids_of(http, live, CHAT, messages=messages)


def test_names_are_passed_over_by_a_template_without_them(
    live: LiveServer, http: httpx.Client
) -> None:
    """Some clients send them unasked, in each message."""
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "So."},
        USER,
    ]
    named = [{**one, "name": one["role"]} for one in messages]
    for more in ({}, {"tools": [TOOL]}):
        told = ids_of(http, live, CHAT, messages=named, **more)
        assert told == ids_of(http, live, CHAT, messages=messages, **more)


def test_results_of_tools(live: LiveServer, http: httpx.Client) -> None:
    """A result may repeat the function's name; text in parts is text; calls need no content."""
    told = []
    for content, result in ((None, "12"), ([], [{**PART, "text": "1"}, {**PART, "text": "2"}])):
        asks = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        answers = {"role": "tool", "tool_call_id": "call_1", "content": result}
        for name in ({}, {"name": "now"}):
            messages = [{"role": "developer", "content": "Be brief."}, USER, asks, answers | name]
            told.append(ids_of(http, live, CHAT, messages=messages, tools=[TOOL]))
    assert told == [told[0]] * 4


@pytest.mark.parametrize("arguments", ['{"at": "no', "", None, {"at": 1}, [1], "[" * 100])
def test_calls_are_sent_back_as_they_are(
    live: LiveServer, http: httpx.Client, arguments: Any
) -> None:
    for function in ({"name": "now", "arguments": arguments}, {"arguments": arguments}, {}):
        asks = {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": function}]}
        result = {"role": "tool", "tool_call_id": "call_1", "content": "cut", "name": "now"}
        ids_of(http, live, CHAT, messages=[USER, asks, result], tools=[TOOL])


def test_answers_are_sent_back_as_they_are(client: OpenAI, live: LiveServer) -> None:
    asked: dict[str, Any] = {"model": live.model, "temperature": 0, "max_tokens": 24}
    for more in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}):
        first = client.chat.completions.create(messages=[USER], **asked, **more).choices[0].message
        assert first.refusal is None
        messages: list[Any] = [USER, first.model_dump()]
        for call in first.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "12"})
        messages.append(USER)
        again = client.chat.completions.create(messages=messages, **asked, **more)
        assert again.usage is not None
        assert again.usage.prompt_tokens > 0


def test_an_answer_without_text_can_be_sent_back(live: LiveServer, http: httpx.Client) -> None:
    """Where tools are there, and the model ends at once."""
    stop = min(live.service.engine.base.stop_token_ids)
    asked = {"model": live.model, "messages": [USER], "tools": [TOOL], "logit_bias": {stop: 100}}
    (choice,) = http.post(CHAT, json=asked).json()["choices"]
    message = {"role": "assistant", "content": "", "refusal": None}
    assert (choice["message"], choice["finish_reason"]) == (message, "stop")
    messages = [USER, choice["message"], USER]
    assert http.post(CHAT, json={**asked, "messages": messages}).status_code == 200


# Answers.


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_made_an_answer(live: LiveServer, http: httpx.Client, path: str) -> None:
    said = {"messages": [USER]} if path == CHAT else {"prompt": "Why?"}
    asked = {"model": live.model, "max_tokens": 2, "service_tier": "flex", **said}
    whole = http.post(path, json=asked).json()
    stream = http.post(path, json={**asked, "stream": True}).text
    events = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    told = [(one["system_fingerprint"], one["service_tier"]) for one in (whole, *events)]
    assert told == [(whole["system_fingerprint"], "default")] * len(told)
    assert whole["system_fingerprint"].startswith("medusa-kit-")
    del asked["service_tier"]
    assert "service_tier" not in http.post(path, json=asked).json()


@pytest.mark.parametrize("form", ["json", "plain"])
def test_the_log_says_that_nothing_is_stored(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    lines: list[str] = []

    class Writer:
        write = staticmethod(lines.append)

    monkeypatch.setattr(logs, "stderr_writer", Writer)
    service = Service(live.service.engine, ServeConfig(log_format=form))
    with TestClient(create_app(service), "http://localhost") as client:
        asked = {"model": live.model, "prompt": "a", "max_tokens": 1}
        for more in ({"store": True}, {"store": False}, {}):
            assert client.post(TEXT, json={**asked, **more}).status_code == 200
    assert ["store: true has no effect" in line for line in lines] == [True, False, False]
