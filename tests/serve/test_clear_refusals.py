"""Errors tell clients what they can act on: no options of the command line, no paths of the server,
no second try of what can never succeed."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.serving.live_server import LiveServer, live_server
from support.small_engines import build_engine, lively_chat_base, random_heads

from medusa_kit.engine.engine import Engine
from medusa_kit.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    ContextLengthError,
    DeviceMemoryError,
    HubError,
    MedusaKitError,
    QueueFullError,
    UnknownModelError,
)
from medusa_kit.heads import save_heads
from medusa_kit.serve.errors import described

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NOT_FOR_CLIENTS = re.compile(r"--\w|medusa-kit |medusa_kit\.|pip install|\(\)|=True|batch_size|/")


@pytest.fixture(scope="module")
def few(engine: Engine) -> Iterator[LiveServer]:
    """A server that can hold five answers."""
    with live_server(engine, max_rows=2, max_queue=3) as live:
        yield live


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": ["a"] * 6}, "prompt"),
        ({"prompt": [[5]] * 3, "n": 2}, "prompt"),
        ({"prompt": "a", "n": 6}, "n"),
        ({"prompt": ["a"] * 3000, "n": 128}, "prompt"),
    ],
    ids=["prompts", "both", "n", "many"],
)
def test_more_answers_than_can_ever_wait(
    few: LiveServer, asked: dict[str, Any], param: str
) -> None:
    with few.http() as http:
        answer = http.post(TEXT, json={"model": few.model, "max_tokens": 1, **asked})
        assert answer.status_code == 400
        assert "Retry-After" not in answer.headers
        error = answer.json()["error"]
        number = asked.get("n", 1) * (
            1 if isinstance(asked["prompt"], str) else len(asked["prompt"])
        )
        assert f"asks for {number} answers" in error["message"]
        assert "5 at most" in error["message"]
        assert error["param"] == param
        chat = {"model": few.model, "messages": [{"role": "user", "content": "a"}], "n": 6}
        assert http.post(CHAT, json=chat).status_code == 400
        most = {"model": few.model, "prompt": ["a"] * 5, "max_tokens": 1}
        assert http.post(TEXT, json=most).status_code == 200


def test_no_path_of_the_server_is_told(tmp_path: Path) -> None:
    base = lively_chat_base()
    where = str(tmp_path / "models" / "parrot")
    base.info = replace(base.info, name=where, source="folder")
    save_heads(random_heads(base), tmp_path / "my-heads")
    engine = build_engine(base, heads=tmp_path / "my-heads")
    with live_server(engine) as live, live.http() as http:
        listed = http.get("/v1/models")
        (one,) = listed.json()["data"]
        assert one["id"] == "parrot"
        assert one["medusa_kit"]["heads"] == "my-heads"
        asked = {"model": "parrot", "prompt": "a", "max_tokens": 2}
        answer = http.post(TEXT, json=asked)
        assert answer.json()["model"] == "parrot"
        assert answer.json()["usage"]["medusa_kit"]["heads"] == "my-heads"
        assert http.post(TEXT, json={**asked, "model": "parrot:my-heads"}).status_code == 200
        told = [
            listed, answer, http.get("/v1/models/parrot"),
            http.post(TEXT, json={**asked, "model": "parrott"}),
            http.post(TEXT, json={**asked, "medusa_kit": {"drafter": "draft-model"}}),
        ]  # fmt: skip
        assert [one.status_code for one in told] == [200, 200, 200, 404, 400]
        assert "'parrot'" in told[-1].json()["error"]["message"]
        for one in told:
            assert str(tmp_path) not in one.text


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("n 5 is wrong", hint="--force uses them"), 400, "n 5 is wrong"),
        (ConfigError("n 5 is wrong", hint="raise --max-rows"), 400, "n 5 is wrong"),
        (ConfigError("n 5 is wrong", hint="did you mean top_n?"), 400, "did you mean top_n?"),
        (UnknownModelError("no heads", hint="start it with --heads-dir"), 404, "no heads"),
        (ContextLengthError("x has 9 tokens"), 400, "the prompt is too long: x has 9 tokens"),
        (QueueFullError("it is full", hint="let more wait (most_waiting)"), 429, "ask again later"),
        (DeviceMemoryError("no room", hint="decode fewer (batch_size)"), 503, "again later"),
        (HubError("no token", hint="`medusa-kit login`"), 503, "ask again later"),
        (ClosedError("ValueError: /srv/x", hint="make another batch"), 503, "no more requests"),
        (CheckpointError("/srv/x is cut off", hint="copy it again"), 500, "see its log"),
        (MedusaKitError("x", hint="call generate()"), 500, "see its log"),
    ],
    ids=lambda value: str(value)[:30].replace("\n", " "),
)
def test_hints_are_for_clients(error: MedusaKitError, status: int, said: str) -> None:
    told, content = described(error)
    assert told == status
    message = content["error"]["message"]
    assert said in message
    assert not NOT_FOR_CLIENTS.search(message), message


@pytest.mark.parametrize(
    "fields",
    [
        {"medusa_kit": {"drafter": "medusa"}},
        {"medusa_kit": {"drafter": "draft-model"}},
        {"medusa_kit": {"drafter_options": {"colour": 5}}},
        {"model": "lively:other"},
        {"temperature": -1},
        {"stop": "x" * 5, "top_k": -5},
    ],
    ids=str,
)
def test_hints_of_requests(fields: dict[str, Any]) -> None:
    with live_server(build_engine(lively_chat_base())) as live, live.http() as http:
        answer = http.post(TEXT, json={"model": live.model, "prompt": "a", **fields})
    assert answer.status_code in (400, 404)
    message = answer.json()["error"]["message"]
    assert not NOT_FOR_CLIENTS.search(message.replace("GET /v1/models", "")), message


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("body", "kind", "status", "said"),
    [
        (b'{"model": "x", "prompt": ' + DEEP, "application/json", 400, "nested too deeply"),
        (b'{"model": "x", "prompt": "a", "seed": \xff}', "application/json", 400, "not UTF-8"),
        (b'{"model": "x"}', None, 400, "Content-Type is missing; expected application/json"),
        (b'{"model": "x"}', "text/plain", 415, "Content-Type is 'text/plain'"),
        (b"model=x", "application/x-www-form-urlencoded", 415, "expected application/json"),
        (b"", None, 400, "the body is missing"),
    ],
    ids=["deep", "bytes", "no type", "text", "form", "nothing"],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies_that_are_not_read(
    live: LiveServer, path: str, body: bytes, kind: str | None, status: int, said: str
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    with live.http() as http:
        answer = http.post(path, content=body, headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_json_in_json_that_is_nested_deeply(live: LiveServer) -> None:
    """It is read as JSON, and too deep for what checks it."""
    with live.http() as http:
        for depth in (300, 900, 5000):
            deep = b'{"a":' * depth + b"1" + b"}" * depth
            body = json.dumps({"model": live.model, "messages": []})[:-1].encode()
            answer = http.post(
                CHAT,
                content=body + b', "response_format": ' + deep + b"}",
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code == 400, answer.text


def test_streams_are_not_held_back(live: LiveServer) -> None:
    asked = {"model": live.model, "prompt": "a", "max_tokens": 2, "stream": True}
    with live.http() as http:
        answer = http.post(TEXT, json=asked)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert answer.headers["Cache-Control"] == "no-cache"


def test_a_first_request_is_told_what_to_write(few: LiveServer) -> None:
    form = "application/x-www-form-urlencoded"
    with few.http() as http:
        for path in (CHAT, TEXT):
            unnamed = http.post(path, json={"prompt": "a", "messages": []}).json()["error"]
            assert unnamed["message"].startswith(f"'model' is missing; expected '{few.model}'")
            assert unnamed["param"] == "model"
            refused = http.post(path, content=b"{}", headers={"Content-Type": form})
            assert f"Content-Type is '{form}'; expected" in refused.json()["error"]["message"]
