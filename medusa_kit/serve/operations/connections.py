"""uvicorn's HTTP connections, with the limits that it lacks.

Of time, of their number, which spares those there are, where uvicorn's own would refuse requests on
all of them; and of what one of them may have parsed at a time.
"""

import asyncio
from collections import OrderedDict, deque
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from medusa_kit.serve.operations.limits import crowded
from medusa_kit.serve.operations.open_files import SPARE, backlog
from medusa_kit.settings.serve_limits import LimitOptions

SLACK = 1.0  # seconds by which the app's own limit comes first (limits.py), which logs it
RESTED = 1.0  # seconds that a connection must have been idle between requests to make room
PIECE = 2048  # bytes parsed at a time, of what may be chunks of a byte each


def protocol_for(options: LimitOptions) -> type[H11Protocol]:
    """The class for uvicorn's option `http`, of one server.

    A connection is closed where no request is whole up to its body within `body_timeout`, and
    where nothing could be sent for `send_timeout`. uvicorn would wait for ever. Where there are
    too many, the one that has been idle longest makes room.
    """
    idle, paced = _Idle(), _Paced()

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.flow: _Flow = _Flow(transport)
            self._asking = _Deadline(transport, options.body_timeout)
            self._sending = _Deadline(transport, options.send_timeout + SLACK)
            self._asking.start()
            most = options.max_connections
            if len(self.connections) > most + SPARE:
                transport.abort()
            elif len(self.connections) > most and not idle.make_room():
                self.app = crowded(self.app)
            idle.add(self, silent=True)

        def data_received(self, data: bytes) -> None:
            if self.flow.held or len(data) > PIECE:
                return paced.add(self, data)
            self.take(data)

        def take(self, data: bytes) -> None:
            """Parse some of what has arrived."""
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._asking.stop()
                idle.remove(self)
            else:  # it is part of the next request
                self._asking.start()

        @property
        def parses_fast(self) -> bool:
            """Whether what comes is one piece to h11, whatever its length."""
            given = {name for name, _ in getattr(self, "headers", ())}
            counted = b"content-length" in given and b"transfer-encoding" not in given
            return counted and self.conn.their_state is h11.SEND_BODY

        def on_response_complete(self) -> None:
            self._asking.stop()  # uvicorn has a limit of its own between requests
            idle.add(self, silent=False)
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._sending.start()

        def resume_writing(self) -> None:
            self._sending.stop()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.remove(self)
            paced.remove(self)
            self._asking.stop()
            self._sending.stop()
            super().connection_lost(exc)

    return Connection


class _Flow(FlowControl):
    """`held`: nothing more is read, whoever asks for it."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class _Idle:
    """Connections without a request under way, those that have been so longest first."""

    def __init__(self) -> None:
        self._silent: OrderedDict[Any, float] = OrderedDict()  # which have not sent a whole one
        self._between: OrderedDict[Any, float] = OrderedDict()

    def add(self, connection: Any, silent: bool) -> None:
        since = asyncio.get_running_loop().time()
        (self._silent if silent else self._between)[connection] = since

    def remove(self, connection: Any) -> None:
        self._silent.pop(connection, None)
        self._between.pop(connection, None)

    def make_room(self) -> bool:
        """Break one off. Those that have been used may be about to be used again."""
        rested = asyncio.get_running_loop().time() - RESTED
        if self._silent:
            connection, _ = self._silent.popitem(last=False)
        elif self._between and next(iter(self._between.values())) <= rested:
            connection, _ = self._between.popitem(last=False)
        else:
            return False
        connection.transport.abort()
        return True


class _Paced:
    """What has arrived and is not parsed yet, in turns of a piece for each connection, with the
    loop's other work in between: h11 takes half a second for 256 KiB of chunks of one byte."""

    def __init__(self) -> None:
        self._left: dict[Any, bytearray] = {}
        self._order: deque[Any] = deque()
        self._running = False

    def add(self, connection: Any, data: bytes) -> None:
        connection.flow.pause_reading()
        connection.flow.held = True
        if connection not in self._left:
            self._left[connection] = bytearray()
            self._order.append(connection)
        self._left[connection] += data
        if not self._running:
            self._running = True
            self._step()

    def remove(self, connection: Any) -> None:
        if self._left.pop(connection, None) is not None:
            self._order.remove(connection)

    def _step(self) -> None:
        if not self._order:
            self._running = False
            return
        connection = self._order.popleft()
        left = self._left[connection]
        size = len(left) if connection.parses_fast else PIECE
        piece = bytes(left[:size])
        del left[:size]
        if left:
            self._order.append(connection)
        else:
            del self._left[connection]
            connection.flow.held = False
            connection.flow.resume_reading()
        asyncio.get_running_loop().call_soon(self._step)
        if not connection.transport.is_closing():
            connection.take(piece)


class _Deadline:
    """Breaks a connection off unless it is stopped in time."""

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Unless it runs."""
        if self._timer is None and not self._transport.is_closing():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, self._transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def uvicorn_options(options: LimitOptions) -> dict[str, Any]:
    """What uvicorn.Config needs to hold these limits. Requests are logged by logs.py."""
    return {
        "http": protocol_for(options),
        "ws": "none",
        "access_log": False,
        "backlog": backlog(),
        "server_header": False,
    }
