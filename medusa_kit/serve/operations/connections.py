"""uvicorn's HTTP connections, with the time limits that it lacks, and a limit of their number that
spares those there are: uvicorn's own would refuse requests on all of them."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from medusa_kit.serve.operations.limits import crowded
from medusa_kit.settings.serve_limits import LimitOptions

SLACK = 1.0  # seconds by which the app's own limit comes first (limits.py), which logs it


def protocol_for(options: LimitOptions) -> type[H11Protocol]:
    """The class for uvicorn's option `http`.

    A connection is closed where no request is whole up to its body within `body_timeout`, and
    where nothing could be sent for `send_timeout`. uvicorn would wait for ever.
    """

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > options.max_connections:
                self.app = crowded(self.app)
            self._asking = _Deadline(transport, options.body_timeout)
            self._sending = _Deadline(transport, options.send_timeout + SLACK)
            self._asking.start()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._asking.stop()
            else:  # it is part of the next request
                self._asking.start()

        def on_response_complete(self) -> None:
            self._asking.stop()  # uvicorn has a limit of its own between requests
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._sending.start()

        def resume_writing(self) -> None:
            self._sending.stop()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._asking.stop()
            self._sending.stop()
            super().connection_lost(exc)

    return Connection


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
        "server_header": False,
    }
