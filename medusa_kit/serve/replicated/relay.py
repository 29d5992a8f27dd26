"""One request, passed on to a replica, and its answer back.

An answer is held back until its first byte is there. A replica that dies before that is asked
nothing more: another one gets the request. After the first byte the client is told of the failure,
as another answer would not go on where this one ended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send

from medusa_kit import console
from medusa_kit.serve.errors import RequestError, RequestTimeoutError, ServerClosingError, described
from medusa_kit.serve.replicated.affinity import RoutingKey
from medusa_kit.serve.streaming import sse_event, unless_gone

PASSED_ON = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string",
             "root_path", "headers", "client", "server", "asgi")  # fmt: skip
OWN_HEADER = b"x-request-id"  # the front's, by which its log names the request
EVENTS = b"text/event-stream"
SLACK = 10.0  # seconds by which a replica's own time limit comes first
MAX_TRIES = 8
PAUSE = 0.2  # seconds, after a replica was lost: the router needs a moment to hear of it


@dataclass(frozen=True)
class Forwarded:
    """A request as a replica gets it."""

    scope: dict[str, Any]
    body: bytes
    key: RoutingKey = field(default_factory=RoutingKey)


class Source(Protocol):
    """What a replica sends: ASGI's messages."""

    def __aiter__(self) -> AsyncIterator[MutableMapping[str, Any]]: ...

    def cancel(self) -> None:
        """End the answer there."""
        ...


class ReplicaLostError(RequestError):
    status = 503


def forwarded(scope: Scope, body: bytes, key: RoutingKey) -> Forwarded:
    kept = {name: scope[name] for name in PASSED_ON if name in scope}
    return Forwarded({**kept, "root_path": ""}, body, key)


class Relay:
    """`ask`: sends the request to a replica, which is not that of the last try if that has died.
    `lost`: what it raises where its replica has. `timeout`: seconds in all."""

    def __init__(
        self,
        ask: Callable[[Forwarded], Source],
        lost: tuple[type[BaseException], ...],
        timeout: float,
    ) -> None:
        self._ask, self._lost, self._timeout = ask, lost, timeout
        self._work: asyncio.Task[None] | None = None
        self._start: Message | None = None  # held back
        self._begun = self._cancelled = False

    async def run(self, request: Forwarded, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what an answer that has not begun failed of."""
        self._work = asyncio.ensure_future(self._answer(request, scope, send))
        await unless_gone(HttpRequest(scope, receive), self._work)

    def cancel(self) -> None:
        """End the answer, since the server ends. Called in its loop."""
        self._cancelled = True
        if self._work is not None:
            self._work.cancel()

    async def _answer(self, request: Forwarded, scope: Scope, send: Send) -> None:
        try:
            await asyncio.wait_for(self._tries(request, scope, send), self._timeout)
            return
        except TimeoutError:
            error: Exception = RequestTimeoutError(
                f"no replica answered within {self._timeout:g} seconds", code="timeout"
            )
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            error = ServerClosingError("the server is closing", code="closing")
        except ReplicaLostError as lost:
            error = lost
        if not self._begun or not self._streams():
            raise error  # after the first byte that breaks the connection off
        await send({"type": "http.response.body", "body": sse_event(described(error)[1])})

    async def _tries(self, request: Forwarded, scope: Scope, send: Send) -> None:
        for number in range(1, MAX_TRIES + 1):
            source = self._ask(request)
            try:
                return await self._pass_on(source, scope, send)
            except self._lost as error:
                console.warn(f"a replica was lost: {type(error).__name__}")
                if self._begun:
                    break
            finally:
                source.cancel()  # no effect on one that has ended
            await asyncio.sleep(PAUSE * number)
        raise ReplicaLostError("the replica that answered was lost", code="replica_lost")

    async def _pass_on(self, source: Source, scope: Scope, send: Send) -> None:
        async for message in source:
            if message["type"] == "http.response.start":
                self._start = _own_start(message, scope)
                continue
            if not self._begun and self._start is not None:
                self._begun = True
                await send(self._start)
            await send(message)

    def _streams(self) -> bool:
        headers = dict(self._start["headers"]) if self._start else {}
        return bool(headers.get(b"content-type", b"").startswith(EVENTS))


def _own_start(message: MutableMapping[str, Any], scope: Scope) -> Message:
    """A replica's first message without what the front adds itself; the route is for its
    counters."""
    scope["route"] = _Route(message.get("route"))
    headers = [(name, value) for name, value in message["headers"] if name != OWN_HEADER]
    return {"type": message["type"], "status": message["status"], "headers": headers}


@dataclass(frozen=True)
class _Route:
    path: str | None
