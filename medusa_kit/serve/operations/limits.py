"""What a client may cost: the length of its request, and the time it takes to send and to read.

A body is read whole before the app sees the request, so that one which is too long, too slow or cut
off reaches neither the app nor the batch.
"""

from collections.abc import Callable
from contextlib import suppress

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_kit.serve.operations.bodies import LARGE, Turns
from medusa_kit.serve.operations.refusal import refuse
from medusa_kit.settings.serve_limits import LimitOptions

LINGER = 1.0  # seconds for which a body that is too long is read on, for the answer to it
CLOSE = {"Connection": "close"}
CROWDED = "medusa_kit_crowded"  # in a scope's state: of one connection too many
MAX_HELD = 128 * 1024 * 1024  # bytes of the bodies of all requests under way
MIN_HELD = 4  # of the longest bodies allowed, where these are longer


class SlowReaderError(ConnectionError):
    """The client does not read its answer. Starlette takes it for a client that has gone."""


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str, kind: str) -> None:
        super().__init__(message)
        self.status, self.code, self.kind = status, code, kind


class _Gone(Exception):
    """The client hung up before its request was whole."""


def _always_ready() -> None:
    return None


def crowded(app: ASGIApp) -> ASGIApp:
    """`app` for a connection too many."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[CROWDED] = True
        await app(scope, receive, send)

    return marked


class LimitsMiddleware:
    """503 on a connection too many, and while requests under way have too many bytes of bodies; 413
    for a body above `max_body`, 408 for one that is not there within `body_timeout`; an answer of
    which nothing could be sent for `send_timeout` is cancelled."""

    def __init__(
        self,
        app: ASGIApp,
        options: LimitOptions,
        turns: Turns | None = None,
        not_ready: Callable[[], str | None] | None = None,
    ) -> None:
        """`not_ready`: why nothing is answered now, or None."""
        self.app, self.options = app, options
        self._not_ready = not_ready or _always_ready
        self._turns, self._body_bytes = turns or Turns(), 0
        self._max_body_bytes = max(MAX_HELD, MIN_HELD * options.max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if CROWDED in scope.get("state", {}):
            return await self._crowded(receive, send)
        if scope["method"] == "POST" and (why := self._not_ready()) is not None:
            return await self._closing(send, why)
        read, size = bytearray(), 0
        try:
            try:
                await self._read_body(scope, receive, read)
            finally:
                size = len(read)
            body = bytes(read)
            read.clear()
            with suppress(SlowReaderError):  # the server closes the connection
                await self.app(scope, _replay(body, receive), self._impatient(send))
        except _Gone:
            return
        except _Refused as why:
            headers = {**CLOSE, "Retry-After": "1"} if why.status == 503 else CLOSE
            await refuse(send, why.status, str(why), kind=why.kind, code=why.code, headers=headers)
        finally:
            self._body_bytes -= size
            if size >= LARGE:
                self._turns.give_back()

    async def _closing(self, send: Send, why: str) -> None:
        """Refuse a request without a look at its body, so that nobody can hold up the end."""
        message = (
            "the server is closing" if why == "closing" else "the server takes no more requests"
        )
        headers = {**CLOSE, "Retry-After": "1"}
        kind = "service_unavailable_error"
        await refuse(send, 503, message, kind=kind, code="closing", headers=headers)

    async def _crowded(self, receive: Receive, send: Send) -> None:
        await _discard(receive)
        await refuse(
            send,
            503,
            f"the server has {self.options.max_connections} connections, which is all it takes",
            kind="service_unavailable_error",
            code="too_many_connections",
            headers={**CLOSE, "Retry-After": "1"},
        )

    async def _read_body(self, scope: Scope, receive: Receive, read: bytearray) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        declared = int(length[:19]) if length.isdigit() else 0
        limit = self.options.max_body
        if declared > limit:
            if b"expect" not in headers:  # who asks first waits for the answer
                await _discard(receive)
            raise self._too_long(f"{declared:,} bytes")
        try:
            with anyio.fail_after(self.options.body_timeout):
                more = True
                while more and len(read) <= limit:
                    before = len(read)
                    more = await _read_more(receive, read)
                    self._hold(len(read) - before)
        except TimeoutError:
            raise _Refused(
                408,
                f"the request's body did not arrive within {self.options.body_timeout:g} s; "
                f"{len(read):,} bytes of it did",
                "request_timeout",
                "timeout_error",
            ) from None
        if len(read) <= limit:
            return
        if more:
            await _discard(receive)
        raise self._too_long(f"over {limit:,} bytes")

    def _hold(self, more: int) -> None:
        self._body_bytes += more
        if self._body_bytes > self._max_body_bytes:
            raise _Refused(
                503,
                f"the bodies of requests under way have {self._body_bytes:,} bytes; expected at "
                f"most {self._max_body_bytes:,}",
                "too_many_bodies",
                "service_unavailable_error",
            )

    def _too_long(self, length: str) -> _Refused:
        return _Refused(
            413,
            f"the request's body has {length}; expected at most {self.options.max_body:,} bytes",
            "request_too_large",
            "invalid_request_error",
        )

    def _impatient(self, send: Send) -> Send:
        """`send`, which waits while the client does not read, for so many seconds at most."""
        seconds = self.options.send_timeout

        async def impatient(message: Message) -> None:
            try:
                with anyio.fail_after(seconds):
                    await send(message)
            except TimeoutError:
                raise SlowReaderError(f"the client read nothing for {seconds:g} s") from None

        return impatient


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever comes: that the client has gone."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


async def _read_more(receive: Receive, read: bytearray) -> bool:
    """Whether there is more after the next piece, which is put into `read`."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _Gone
    read += message.get("body", b"")
    return bool(message.get("more_body", False))


async def _discard(receive: Receive) -> None:
    """Clients that send everything before they read would not see an answer sent earlier: their
    connection would be reset. Only so long, however."""
    with anyio.move_on_after(LINGER), suppress(_Gone):
        while await _read_more(receive, bytearray()):
            pass
