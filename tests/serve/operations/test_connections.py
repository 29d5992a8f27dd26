"""Connections of a real server: half-sent requests, clients that do not read, keys by OpenAI's
client. Limits are short, and nothing is timed: a test that fails waits for ever, or long."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from support.serving.live_server import live_server

from medusa_kit.engine.engine import Engine
from medusa_kit.serve.operations import connections
from medusa_kit.serve.operations.connections import uvicorn_options
from medusa_kit.serve.operations.keys import ApiKeys
from medusa_kit.serve.operations.limits import LimitsMiddleware
from medusa_kit.settings.serve_limits import LimitOptions

PATIENCE = 30
ASK = b"POST / HTTP/1.1\r\nHost: here\r\n"


class Endless:
    """A server whose answers have no end."""

    def __init__(self, options: LimitOptions) -> None:
        self.ended = threading.Event()
        app = Starlette(routes=[Route("/", self.answer, methods=["GET", "POST"])])
        app.add_middleware(LimitsMiddleware, options=options)
        self.server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", lifespan="off", **uvicorn_options(options))
        )

    async def answer(self, request: Request) -> PlainTextResponse | StreamingResponse:
        if request.method == "GET":
            return PlainTextResponse("hello")

        async def events() -> AsyncIterator[bytes]:
            while True:
                yield b"0" * 65536

        ended = self.ended

        class Stream(StreamingResponse):
            async def __call__(self, *given: Any) -> None:
                try:  # as EventStream does it, which cancels its answers here
                    await super().__call__(*given)
                finally:
                    ended.set()

        return Stream(events())


@contextmanager
def serving(options: LimitOptions) -> Iterator[tuple[Endless, int]]:
    one = Endless(options)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=lambda: asyncio.run(one.server.serve([bound])))
        thread.start()
        try:
            yield one, bound.getsockname()[1]
        finally:
            one.server.should_exit = one.server.force_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def everything(client: socket.socket) -> bytes:
    """Until the server closes the connection."""
    got = b""
    try:
        while piece := client.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got


HURRIED = LimitOptions(max_body=100, body_timeout=0.1, send_timeout=0.1)


@pytest.mark.parametrize("sent", [b"", b"POST / HT", ASK])
def test_a_connection_without_a_whole_request_is_closed(sent: bytes) -> None:
    with serving(HURRIED) as (_, port), connect(port) as client:
        client.sendall(sent)
        assert everything(client) == b""


def test_the_next_request_of_a_connection_has_the_same_time() -> None:
    with serving(HURRIED) as (_, port), connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        got = b""
        while not got.endswith(b"hello"):
            got += client.recv(65536)
        client.sendall(b"GET / HT")
        assert everything(client) == b""


def test_a_half_sent_body_is_408() -> None:
    with serving(HURRIED) as (_, port), connect(port) as client:
        client.sendall(ASK + b"Content-Length: 50\r\n\r\nhalf")
        got = everything(client)
        assert got.startswith(b"HTTP/1.1 408 ")
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_a_chunked_body_without_a_length_is_413() -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b"0" * 10

    with serving(HURRIED) as (_, port):
        answer = httpx.post(f"http://127.0.0.1:{port}/", content=pieces(), timeout=PATIENCE)
        assert answer.status_code == 413


def test_a_client_that_does_not_read_is_cancelled_and_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "SLACK", 0.1)
    with serving(HURRIED) as (one, port), connect(port) as client:
        client.sendall(ASK + b"Content-Length: 0\r\n\r\n")
        assert one.ended.wait(PATIENCE)
        # Closing alone would wait for the client to read what lies in uvicorn's buffer.
        while one.server.server_state.connections:
            threading.Event().wait(0.01)


def test_further_connections_are_refused_and_those_there_are_go_on(engine: Engine) -> None:
    with live_server(engine, max_connections=1) as live, live.http() as first:
        assert first.get("/health").status_code == 200  # its connection stays open
        asked = {"model": live.model, "prompt": "a", "max_tokens": 2}
        with live.http() as second:
            refused = second.post("/v1/completions", json=asked)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["Retry-After"] == "1"
        assert first.post("/v1/completions", json=asked).status_code == 200
        page = first.get("/metrics").text
    assert 'medusa_kit_requests_total{route="other",status="503"} 1.0' in page


def test_openai_clients_with_and_without_a_key(engine: Engine) -> None:
    options = {"log_format": "none"}
    with live_server(engine, app={"keys": ApiKeys(["sk-key"])}, **options) as live:
        with live.client(api_key="sk-wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with live.client(api_key="sk-key") as client:
            answer = client.chat.completions.create(
                model=live.model, messages=[{"role": "user", "content": "hello"}], max_tokens=6
            )
        with live.http() as http:
            assert http.get("/health").json() == {"status": "ok"}
            page = http.get("/metrics", headers={"Authorization": "Bearer sk-key"}).text
            live.service.closing = True
            assert http.get("/health").status_code == 503
            live.service.closing = False
    samples = {
        one.name: one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
    }
    assert answer.usage is not None
    assert samples["medusa_kit_tokens_total"] == answer.usage.completion_tokens
    assert samples["medusa_kit_prompt_tokens_total"] == answer.usage.prompt_tokens
    assert samples["medusa_kit_time_to_first_token_seconds_count"] == 1
