"""Every list and object of a request has a bound, and a long body few errors; none is parsed or
encoded in the loop."""

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from support.serving.live_server import LiveServer

from medusa_kit.data import text_size
from medusa_kit.data.text_size import MAX_PER_TOKEN, check_fits, check_size
from medusa_kit.errors import ContextLengthError, nearest
from medusa_kit.serve import prompts
from medusa_kit.serve.errors import MAX_OF_A_MESSAGE
from medusa_kit.serve.operations import body_route
from medusa_kit.serve.operations.given import Given
from medusa_kit.serve.schema import ChatRequest, CompletionRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
MANY = 20_000


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        schema = list(schema.values())
    for one in schema if isinstance(schema, list) else ():
        yield from parts(one)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_list_and_object_of_any_names_has_a_bound(kind: Any) -> None:
    for one in parts(kind.model_json_schema()):
        if one.get("type") == "array":
            assert "maxItems" in one, one
        if one.get("type") == "object" and one.get("additionalProperties") is not False:
            assert "maxProperties" in one, one


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [1] * MANY},
        {"messages": [USER] * MANY},
        {"messages": [{**USER, "content": [1] * MANY}]},
        {"messages": [{**USER, **{f"x{n}": 1 for n in range(MANY)}}]},
        {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]},
        {"messages": [USER], "tools": [1] * MANY},
        {"messages": [USER], "stop": [1] * MANY},
        {"messages": [USER], "stop": "a" * MANY},
        {"messages": [USER], "logit_bias": {f"{n}": 1 for n in range(MANY)}},
        {"messages": [USER], "metadata": {f"{n}": "a" for n in range(MANY)}},
        {"messages": [USER], "chat_template_kwargs": {f"{n}": 1 for n in range(MANY)}},
        {"messages": [USER], "medusa_kit": {"drafter_options": {f"{n}": 1 for n in range(MANY)}}},
        {"messages": [USER], "prediction": {"type": "content", "content": [1] * MANY}},
        {"messages": [USER], **{f"x{n}": 1 for n in range(MANY)}},
        {"messages": [USER], "model": "m" * MANY},
        {"prompt": ["a"] * MANY},
        {"prompt": [["a"]] * MANY},
        {"prompt": [1.5] * MANY},
    ],
    ids=lambda fields: " ".join(fields)[:40],
)
def test_many_faults_are_few_errors(fields: dict[str, Any]) -> None:
    kind: Any = CompletionRequest if "prompt" in fields else ChatRequest
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({"model": "m", **fields})
    assert raised.value.error_count() < 200


def test_nothing_is_searched_for_garbage_while_a_body_is_parsed() -> None:
    """Parsing many lists took several times as long, and held the loop."""
    found: list[str] = []
    body = b'{"model": "m", "messages": [' + b"[]," * MANY + b"[]]}"
    gc.callbacks.append(lambda phase, _: found.append(phase))
    try:
        with pytest.raises(RequestValidationError) as raised:
            body_route._read(body, ChatRequest)
        parsed = len(found)
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert parsed <= 2, "after it, at most"
    kept = [one["input"] for one in raised.value.errors()]
    assert all(isinstance(one, Given) for one in kept), "others would keep the body"
    assert sum(len(str(one)) for one in kept) < 1000


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [1] * MANY}, "messages.0"),
        ({"messages": [USER], "x": "a" * MANY}, "unknown"),
        ({"messages": [{**USER, "role": "a" * MANY}]}, "messages.0.role"),
        ({"messages": [USER], "tool_choice": {"a": "b" * MANY}, "tools": []}, "tool_choice"),
        ({"messages": [USER], "a" * MANY: 1}, "unknown"),
    ],
    ids=["messages", "field", "role", "choice", "name"],
)
def test_large_bodies_get_the_errors_of_small_ones(
    live: LiveServer, body: dict[str, Any], said: str
) -> None:
    with live.http() as http:
        answer = http.post(CHAT, json={"model": live.model, **body})
    assert answer.status_code == 400
    assert said in (message := answer.json()["error"]["message"])
    assert len(message) <= MAX_OF_A_MESSAGE + 3
    assert len(answer.content) < 3 * MAX_OF_A_MESSAGE


@pytest.mark.parametrize(
    ("content", "kind", "status", "said"),
    [
        (b'{"model": ' + b" " * MANY, "application/json", 400, "no JSON"),
        (b'{"model": "' + b"\xff" * MANY + b'"}', "application/json; a=b", 400, "not UTF-8"),
        (b'{"a": "' + b"\\ud800" * MANY + b'"}', "application/json", 400, "half of a character"),
        (b"[" * MANY, "application/json", 400, "nested too deeply"),
        (b"a" * MANY, "text/plain", 415, "text/plain"),
        (b"a" * MANY, None, 400, "Content-Type is missing"),
    ],
)
def test_large_bodies_that_are_not_read(
    live: LiveServer, content: bytes, kind: str | None, status: int, said: str
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    for path in (CHAT, TEXT):
        with live.http() as http:
            answer = http.post(path, content=content, headers=headers)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True)


def test_large_bodies_are_parsed_beside_the_loop(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, names = body_route._read, []

    def noted(*given: Any) -> Any:
        names.append(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(body_route, "_read", noted)
    asked = {"model": live.model, "max_tokens": 2, "temperature": 0, "metadata": {"a": "b"}}
    long = {**asked, "prediction": {"type": "content", "content": "a" * MANY}}
    with live.http() as http:
        texts = []
        for body in (asked, long):
            answer = http.post(CHAT, json={**body, "messages": [USER]})
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]
    assert [name.startswith("medusa-kit bodies") for name in names] == [True]


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
def test_what_cannot_fit_the_context_is_not_rendered(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("rendered")

    monkeypatch.setattr(live.service.conversations, "prompt", never)
    long = "a" * (MAX_PER_TOKEN * live.service.engine.base.info.context_length + 1)
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    given: Any = {
        "messages": [{"role": "user", "content": long}],
        "tools": [tool],
        "chat_template_kwargs": {"a": [{"b": long}]},
    }
    with live.http() as http:
        asked = {"model": live.model, "messages": [USER], field: given[field]}
        answer = http.post(CHAT, json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_long_text_is_refused_by_its_beginning(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, encoded = live.service.engine.base, []
    encode = text_size.encode_text

    def noted(tokenizer: Any, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(text_size, "encode_text", noted)
    context = base.info.context_length
    text = "hello you " * (MAX_PER_TOKEN * context // 10)
    with pytest.raises(ContextLengthError, match="more than"):
        check_fits(base.tokenizer, context, text)
    assert 0 < sum(encoded) < len(text)
    monkeypatch.setattr(prompts, "check_fits", lambda *_: None)
    with live.http() as http:  # the same refusal as by all of it
        answer = http.post(TEXT, json={"model": live.model, "prompt": text})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_texts_of_any_kind_are_measured() -> None:
    for given in ("a" * 65, ["a" * 33, "b" * 33], {"a" * 33: ["b" * 33]}, [[1] * 70]):
        with pytest.raises(ContextLengthError):
            check_size(2, given)
    check_size(2, "a" * 30, [{"b": "c" * 30}], [])


def test_no_neighbour_is_looked_for_of_a_long_word() -> None:
    assert nearest("temperatur", ["temperature"]) == "temperature"
    assert nearest("temperature" + " " * 500, ["temperature" + " " * 499]) is None


def test_bodies_under_way_have_a_limit_together(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_kit.serve.operations import limits
    from medusa_kit.settings.serve_limits import LimitOptions

    monkeypatch.setattr(limits, "MAX_HELD", 250)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.Event().wait() if scope["path"] == "/wait" else None
        await httpx_like(send)

    async def httpx_like(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> list[int]:
        guarded: Any = limits.LimitsMiddleware(app, LimitOptions(max_body=50))
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = json.dumps("a" * 40)
            waiting = [asyncio.create_task(http.post("/wait", content=body)) for _ in range(5)]
            while guarded._body_bytes < 5 * len(body):
                await asyncio.sleep(0)
            refused = await http.post("/", content=body)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            later = await http.post("/", content=body)
            assert guarded._body_bytes == 0
            assert refused.headers["Retry-After"] == "1"
            return [refused.status_code, later.status_code]

    assert asyncio.run(main()) == [503, 200]
