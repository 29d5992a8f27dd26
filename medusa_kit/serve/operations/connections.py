"""uvicorn's HTTP connections, with the limits that it lacks.

Of time, of their number, which spares those there are, where uvicorn's own would refuse requests on
all of them; and of what one of them may have parsed at a time.
"""

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from medusa_kit.serve.operations.limits import crowded
from medusa_kit.serve.operations.open_files import SPARE
from medusa_kit.serve.operations.waiting import PIECE, Flow, Idle, Paced
from medusa_kit.settings.serve_limits import LimitOptions

TAKEN_AT_ONCE = 64  # connections, between which the loop does other work
SLACK = 1.0  # seconds by which the app's own limit comes first (limits.py), which logs it


class Connection(H11Protocol):
    options: ClassVar[LimitOptions]
    idle: ClassVar[Idle]
    paced: ClassVar[Paced]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        self._asking = _Deadline(transport, self.options.body_timeout)
        self._sending = _Deadline(transport, self.options.send_timeout + SLACK)
        self._asking.start()
        max_connections = self.options.max_connections
        if len(self.connections) > max_connections + SPARE:
            transport.abort()
        elif len(self.connections) > max_connections and not self.idle.make_room():
            self.app = crowded(self.app)
        self.idle.add(self, silent=True)

    def data_received(self, data: bytes) -> None:
        if self.flow.paused or len(data) > PIECE:
            return self.paced.add(self, data)
        self.take(data)

    def take(self, data: bytes) -> None:
        """Parse some of what has arrived."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._asking.stop()
            self.idle.remove(self)
        else:  # it is part of the next request
            self._asking.start()

    @property
    def parses_fast(self) -> bool:
        """Whether what comes is one piece to h11, whatever its length."""
        return self.conn.their_state is h11.SEND_BODY and _is_counted(self.headers)

    def on_response_complete(self) -> None:
        self._asking.stop()  # uvicorn has a limit of its own between requests
        self.idle.add(self, silent=False)
        super().on_response_complete()

    def shutdown(self) -> None:
        """End the connection at the server's end, without a wait for requests that are not
        whole."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending.start()

    def resume_writing(self) -> None:
        self._sending.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.remove(self)
        self.paced.remove(self)
        self._asking.stop()
        self._sending.stop()
        super().connection_lost(exc)


def protocol_for(options: LimitOptions) -> type[H11Protocol]:
    """The class for uvicorn's option `http`, of one server.

    A connection is closed where no request is whole up to its body within `body_timeout`, and
    where nothing could be sent for `send_timeout`. uvicorn would wait for ever. Where there are
    too many, the one that has been idle longest makes room.
    """
    shared = {"options": options, "idle": Idle(), "paced": Paced()}
    return type("Connection", (Connection,), shared)


def _is_counted(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a body's length is known before it comes."""
    names = {name for name, _ in headers}
    return b"content-length" in names and b"transfer-encoding" not in names


class _Deadline:
    """Breaks a connection off unless it is stopped in time."""

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the time, unless it runs."""
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
        "backlog": TAKEN_AT_ONCE,
        "server_header": False,
    }
