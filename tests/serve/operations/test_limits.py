"""Bodies that are too long, too slow or cut off, and clients that do not read."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from medusa_kit.errors import ConfigError
from medusa_kit.serve.operations import limits
from medusa_kit.serve.operations.limits import LimitsMiddleware
from medusa_kit.settings.serve_limits import LimitOptions

END = {"type": "http.disconnect"}
SHORT = LimitOptions(max_body=10, body_timeout=0.02, send_timeout=0.02)


def piece(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


class Client:
    """Sends `pieces`, then nothing. Takes `takes` messages of the answer, or all."""

    def __init__(self, *pieces: dict[str, Any], takes: int | None = None) -> None:
        self.pieces, self.takes = list(pieces), takes
        self.got: list[dict[str, Any]] = []
        self.asked = 0

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        if self.pieces:
            return self.pieces.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Any) -> None:
        if self.takes is not None and len(self.got) >= self.takes:
            await asyncio.Event().wait()
        self.got.append(dict(message))

    def ask(self, app: Any, options: LimitOptions = SHORT, **headers: str) -> "Client":
        scope = {
            "type": "http", "method": "POST", "path": "/", "query_string": b"", "root_path": "",
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        }  # fmt: skip
        asyncio.run(LimitsMiddleware(app, options)(scope, self.receive, self.send))
        return self

    @property
    def status(self) -> int | None:
        return self.got[0]["status"] if self.got else None

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(b"".join(one.get("body", b"") for one in self.got))["error"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return {name.lower(): value for name, value in self.got[0]["headers"]}


class App:
    """Answers with what it was sent, and counts its requests."""

    def __init__(self) -> None:
        self.asked = 0
        self.app = Starlette(routes=[Route("/", self.echo, methods=["POST"])])

    async def echo(self, request: Request) -> PlainTextResponse:
        self.asked += 1
        return PlainTextResponse(await request.body())

    async def __call__(self, *given: Any) -> None:
        await self.app(*given)


def test_a_body_reaches_the_app_as_it_was_sent() -> None:
    client = Client(piece(b"01234"), piece(b"56789", more=False)).ask(App())
    assert client.status == 200
    assert client.got[1]["body"] == b"0123456789"


@pytest.mark.parametrize("expect", [True, False])
def test_a_declared_length_above_the_limit_is_413(expect: bool) -> None:
    app, more = App(), {"expect": "100-continue"} if expect else {}
    client = Client(piece(b"0" * 11, more=False)).ask(app, content_length="11", **more)
    assert client.status == 413
    assert client.error["code"] == "request_too_large"
    assert "11 bytes; expected at most 10" in client.error["message"]
    assert client.headers[b"connection"] == b"close"
    assert client.asked == (0 if expect else 1)  # who asks before sending need not send
    assert app.asked == 0


@pytest.mark.parametrize("length", ["9" * 5000, "99999999999"])
def test_an_absurd_length_is_413(length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINGER", 0.01)
    assert Client().ask(App(), content_length=length).status == 413


def test_a_chunked_body_above_the_limit_is_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINGER", 0.01)
    app = App()
    client = Client(*[piece(b"0123") for _ in range(5)]).ask(app, transfer_encoding="chunked")
    assert client.status == 413
    assert client.pieces == []  # the rest is read, for clients that send before they read
    assert app.asked == 0


def test_the_last_byte_counts() -> None:
    assert Client(piece(b"0" * 10, more=False)).ask(App()).status == 200
    assert Client(piece(b"0" * 11, more=False)).ask(App()).status == 413


def test_a_body_that_stops_half_way_is_408() -> None:
    app = App()
    client = Client(piece(b"012")).ask(app)
    assert client.status == 408
    assert client.error["type"] == "timeout_error"
    assert "3 bytes" in client.error["message"]
    assert app.asked == 0


def test_a_client_that_hangs_up_half_way_is_forgotten() -> None:
    app = App()
    client = Client(piece(b"012"), END).ask(app)
    assert client.got == []
    assert app.asked == 0


def test_a_client_that_does_not_read_has_its_answer_cancelled() -> None:
    """The response holds rows of the batch: it ends, and nothing piles up before."""
    made, ended = [], []

    async def events() -> AsyncIterator[bytes]:
        for number in range(1000):
            made.append(number)
            yield b"data: x\n\n"

    class Stream(StreamingResponse):
        async def __call__(self, *given: Any) -> None:
            try:
                await super().__call__(*given)
            finally:
                ended.append(True)

    async def stream(request: Request) -> StreamingResponse:
        return Stream(events())

    app = Starlette(routes=[Route("/", stream, methods=["POST"])])
    client = Client(piece(b"", more=False), takes=3).ask(app)
    assert len(client.got) == 3  # the start and two pieces
    assert made == [0, 1, 2]
    assert ended == [True]


def test_what_an_app_raises_is_not_taken_for_a_slow_client() -> None:
    async def failing(*_: Any) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        Client(piece(b"", more=False)).ask(failing)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body": 0},
        {"max_connections": True},
        {"body_timeout": 0},
        {"send_timeout": float("nan")},
        {"log_format": "xml"},
        {"cors_origin": ""},
        {"cors_origin": "app.example"},
        {"cors_origin": "https://app.example/path"},
    ],
)
def test_options_that_are_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LimitOptions(**wrong)


def test_origins() -> None:
    assert LimitOptions().origins == []
    assert LimitOptions(cors_origin="*").origins == ["*"]
    given = "https://a.example/, http://localhost:3000"
    assert LimitOptions(cors_origin=given).origins == ["https://a.example", "http://localhost:3000"]
