"""One replica: an engine and the whole application, asked by calls instead of connections."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Message

from medusa_kit.serve.app import batch_state, create_app
from medusa_kit.serve.operations.metrics import route_of
from medusa_kit.serve.replicated.relay import Forwarded
from medusa_kit.serve.service import Service
from medusa_kit.settings.serve import ServeConfig


@dataclass(frozen=True)
class ReplicaState:
    """`served`: the names of models, the base first. `metrics`: a page for Prometheus."""

    name: str
    served: tuple[str, ...]
    batch: Mapping[str, Any]
    metrics: bytes


class Replica:
    """`loading`: arguments of `medusa_kit.load`. `folder`: that relative paths are looked up in."""

    def __init__(
        self,
        loading: Mapping[str, Any],
        config: ServeConfig,
        folder: str,
        threads: int,
        name: str | None = None,
    ) -> None:
        import torch

        import medusa_kit

        self._name = name or str(os.getpid())
        with contextlib.suppress(OSError):  # another machine may lack it
            os.chdir(folder)
        torch.set_num_threads(threads)
        # Keys, CORS, names and the log are the front's, which every request has come through.
        inner = replace(
            config, api_key_file=None, cors_origin=None, allowed_hosts="*", log_format="none"
        )
        self.service = Service(medusa_kit.load(**loading), inner)
        self.service.prepare()
        self._app = create_app(self.service)

    async def answer(self, request: Forwarded) -> AsyncIterator[Message]:
        """ASGI's messages. Closing or cancelling this hangs up."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        closed, unread = asyncio.Event(), [request.body]
        scope: dict[str, Any] = {**request.scope, "state": {}}

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "route": route_of(scope)}
            await sent.put(message)

        async def answered() -> None:
            try:
                await self._app(scope, receive, send)
            finally:
                sent.put_nowait(None)

        work = asyncio.ensure_future(answered())
        try:
            while (message := await sent.get()) is not None:
                yield message
            await work  # raises what it failed of
        finally:
            closed.set()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    def state(self) -> ReplicaState:
        service = self.service
        served = tuple(str(entry["id"]) for entry in service.names.entries())
        return ReplicaState(self._name, served, batch_state(service), service.metrics.page())

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica where this raises."""
        if (why := self.service.batch.ended) is not None:
            raise RuntimeError(why)

    def __del__(self) -> None:
        if (service := getattr(self, "service", None)) is not None:
            service.close(drain=False)
