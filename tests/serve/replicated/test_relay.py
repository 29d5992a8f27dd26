"""A request on its way to a replica, and the answer back: what is tried again, and what is not."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from medusa_kit.errors import MedusaKitError
from medusa_kit.serve.errors import RequestTimeoutError, ServerClosingError
from medusa_kit.serve.replicated import relay as module
from medusa_kit.serve.replicated.relay import Forwarded, Relay, ReplicaLostError

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}


class DiedError(Exception):
    pass


def start(kind: str = "application/json") -> dict[str, Any]:
    headers = [(b"content-type", kind.encode()), (b"x-request-id", b"theirs")]
    return {"type": "http.response.start", "status": 200, "headers": headers, "route": "/v1/x"}


def piece(text: str, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class Script:
    """A replica: messages to send, exceptions to raise, None: to wait for ever."""

    def __init__(self, *steps: Any) -> None:
        self.steps, self.cancelled, self.waits = steps, False, asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Any]:
        for step in self.steps:
            if step is None:
                self.waits.set()
                await asyncio.Event().wait()
            if isinstance(step, Exception):
                raise step
            yield step

    def cancel(self) -> None:
        self.cancelled = True


class Client:
    def __init__(self, scripts: Sequence[Script], timeout: float = 60) -> None:
        self.scripts, self.asked, self.got = list(scripts), list[Script](), list[dict[str, Any]]()
        self.relay = Relay(self.ask, (DiedError,), timeout)
        self.gone, self.scope = asyncio.Event(), dict(SCOPE)

    def ask(self, request: Forwarded) -> Script:
        self.asked.append(self.scripts.pop(0))
        return self.asked[-1]

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)

    async def run(self) -> str:
        await self.relay.run(Forwarded(self.scope, b""), self.scope, self.receive, self.send)
        return b"".join(one.get("body", b"") for one in self.got).decode()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0)


def test_a_replica_lost_before_the_first_byte_is_replaced_by_another() -> None:
    async def run() -> None:
        lost = [Script(DiedError()), Script(start("text/event-stream"), DiedError())]
        client = Client([*lost, Script(start(), piece("a", True), piece("b"))])
        assert await client.run() == "ab"
        assert len(client.asked) == 3
        assert [one["type"] for one in client.got].count("http.response.start") == 1
        assert client.got[0]["headers"] == [(b"content-type", b"application/json")]
        assert client.scope["route"].path == "/v1/x"

    asyncio.run(run())


def test_a_stream_that_has_begun_is_not_tried_again_and_says_so() -> None:
    async def run() -> None:
        script = Script(start("text/event-stream"), piece("data: 1\n\n", True), DiedError())
        client = Client([script, Script(start(), piece("again"))])
        first, last, _ = (await client.run()).split("\n\n")
        assert first == "data: 1"
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("replica_lost", "service_unavailable_error")
        assert len(client.asked) == 1
        assert not client.got[-1].get("more_body", False)

    asyncio.run(run())


def test_an_answer_cut_off_after_its_first_byte_is_an_error() -> None:
    async def run() -> None:
        client = Client([Script(start(), piece("{", True), DiedError())])
        with pytest.raises(ReplicaLostError):
            await client.run()

    asyncio.run(run())


def test_it_is_not_tried_for_ever() -> None:
    async def run() -> None:
        client = Client([Script(DiedError()) for _ in range(20)])
        with pytest.raises(ReplicaLostError):
            await client.run()
        assert len(client.asked) == module.MAX_TRIES

    asyncio.run(run())


def test_what_else_fails_is_not_tried_again() -> None:
    async def run() -> None:
        client = Client([Script(MedusaKitError("no")), Script(start(), piece("x"))])
        with pytest.raises(MedusaKitError, match="no"):
            await client.run()
        assert len(client.asked) == 1

    asyncio.run(run())


def test_a_client_that_hangs_up_ends_the_replica_s_work() -> None:
    async def run() -> None:
        script = Script(start("text/event-stream"), piece("data: 1\n\n", True), None)
        client = Client([script])
        running = asyncio.ensure_future(client.run())
        await script.waits.wait()
        client.gone.set()
        await running
        assert script.cancelled

    asyncio.run(run())


@pytest.mark.parametrize("begun", [False, True])
def test_at_the_server_s_end_answers_are_cancelled(begun: bool) -> None:
    async def run() -> None:
        before = [start("text/event-stream"), piece("data: 1\n\n", True)] if begun else []
        script = Script(*before, None)
        client = Client([script])
        running = asyncio.ensure_future(client.run())
        await script.waits.wait()
        client.relay.cancel()
        if begun:
            assert '"code":"closing"' in await running
        else:
            with pytest.raises(ServerClosingError):
                await running
        assert script.cancelled

    asyncio.run(run())


def test_nobody_waits_for_ever_for_a_replica() -> None:
    async def run() -> None:
        client = Client([Script(None)], timeout=0.01)
        with pytest.raises(RequestTimeoutError, match=r"within 0\.01 s"):
            await client.run()

    asyncio.run(run())
