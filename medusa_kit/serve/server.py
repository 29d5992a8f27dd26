"""uvicorn around the application: the socket first, and an end that lets answers finish."""

import asyncio
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from medusa_kit import console
from medusa_kit.errors import ConfigError
from medusa_kit.serve.operations.connections import uvicorn_options
from medusa_kit.serve.operations.open_files import QuietAboutFiles
from medusa_kit.settings.serve import ServeConfig

MAX_WAITING = 2048  # connections that the system keeps until they are taken
TELLING = 2.0  # seconds for which /health says that the server has failed, before it ends


def bind(host: str, port: int) -> socket.socket:
    """A socket for this address. Raises ConfigError where it cannot be had."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}",
            hint="give another --port (0 takes a free one), or a --host of this machine",
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Answering(Protocol):
    """What answers the requests (service.py, replicated/front.py)."""

    closing: bool

    @property
    def failed(self) -> str | None:
        """Why nothing is answered any more."""
        ...

    @property
    def config(self) -> ServeConfig: ...

    @property
    def idle(self) -> bool: ...

    def cancel(self) -> None:
        """End all that is under way."""
        ...


class Server(uvicorn.Server):
    """A server that ends by signals. At the first new requests get 503 and those under way go on,
    for `drain_timeout` seconds at most; at the second they are cancelled. It returns, so the exit
    status is 0.

    `ready`: what is called once connections are taken.
    """

    def __init__(
        self, config: uvicorn.Config, service: Answering, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready
        self._until: float | None = None  # when those under way are cancelled
        self._told_until = 0.0  # by /health
        self.failure: str | None = None  # of which it ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(QuietAboutFiles())
        await super().startup(sockets)
        if self.started:
            for bound in sockets or ():
                bound.listen(MAX_WAITING)
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._until is None:
            self.drain()
        else:
            self._until = 0.0

    def drain(self) -> None:
        """Let answers under way finish, and take no more requests. Any thread may call."""
        self._service.closing = True
        self._until = time.monotonic() + self._service.config.drain_timeout

    async def on_tick(self, counter: int) -> bool:
        if self._until is None and self._service.failed is not None:
            self.failure = self._service.failed
            self._until = self._told_until = time.monotonic() + TELLING
        if self._until is not None:
            late = time.monotonic() >= self._until
            if late and not self._service.idle:
                console.warn("answers under way are cancelled")
                self._service.cancel()
            telling = time.monotonic() < self._told_until
            self.should_exit |= late or (self._service.idle and not telling)
        return await super().on_tick(counter)


def server_for(app: FastAPI, service: Answering, ready: Callable[[], None]) -> Server:
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=2, timeout_keep_alive=30,
        lifespan="on", **uvicorn_options(service.config),
    )  # fmt: skip
    return Server(config, service, ready)


def first_lines(names: str, url: str, how_many: str) -> str:
    """What the server prints once it takes connections."""
    # A browser can open no address that stands for all of this machine's.
    page = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    lines = [
        f"serving {names} at {url}/v1 (OpenAI's API; {how_many})",
        f"chat page: {page}/ (Ctrl-C ends the server)",
    ]
    if page != url and (host := address_for_others("[" in url)) is not None:
        lines.append(f"from other machines: http://{host}:{url.rpartition(':')[2]}/")
    return "\n".join(lines)


def address_for_others(version_6: bool = False) -> str | None:
    """The address by which others reach this machine; None where it has no network."""
    family = socket.AF_INET6 if version_6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            # Of a range that is kept for documentation. Nothing is sent: only a route is chosen.
            asking.connect(("2001:db8::1" if version_6 else "192.0.2.1", 9))
        except OSError:
            return None
        host = asking.getsockname()[0]
    return f"[{host}]" if version_6 else host


def listen(server: uvicorn.Server, config: ServeConfig, bound: socket.socket) -> None:
    """Answer until the end. Raises ConfigError where that cannot begin."""
    try:
        server.run([bound])
    except OSError as error:  # another process began to listen there while the model loaded
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}",
            hint="give another --port",
        ) from error
