"""medusa-kit's own server on the loopback interface, in a thread of the test's process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from medusa_kit.engine.engine import Engine
from medusa_kit.serve.app import create_app
from medusa_kit.serve.server import Server, bind, server_for, url_of
from medusa_kit.serve.service import Service
from medusa_kit.settings.serve import ServeConfig


@dataclass
class LiveServer:
    service: Service
    server: Server
    url: str
    thread: threading.Thread

    def client(self, **options: Any) -> OpenAI:
        """OpenAI's own, which does not try again; to be closed."""
        given = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return OpenAI(base_url=f"{self.url}/v1", **given)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    @property
    def model(self) -> str:
        return self.service.engine.base.info.name


@contextmanager
def live_server(
    engine: Engine, *, app: dict[str, Any] | None = None, **options: Any
) -> Iterator[LiveServer]:
    """`app`: more arguments of `create_app`; `options`: of ServeConfig."""
    config = ServeConfig(**{"port": 0, "log_format": "none", **options})
    bound = bind(config.host, config.port)
    service = Service(engine, config)
    ready = threading.Event()
    server = server_for(create_app(service, **(app or {})), service, ready.set)

    async def serve() -> None:
        await server.serve([bound])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    url = url_of(bound)
    thread.start()
    try:
        assert ready.wait(30)
        yield LiveServer(service, server, url, thread)
    finally:
        server.should_exit = True
        thread.join(30)
        service.close(drain=False)
        assert not thread.is_alive()
