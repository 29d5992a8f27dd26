"""What clients connect to: keys, limits and the log of the one server, around replicas that answer.

It knows of Ray no more than `Pool` says.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from medusa_kit.serve import errors
from medusa_kit.serve.errors import ServerClosingError
from medusa_kit.serve.operations.guard import guard
from medusa_kit.serve.operations.keys import ApiKeys
from medusa_kit.serve.operations.metrics import Metrics
from medusa_kit.serve.replicated.affinity import RoutingKey, routing_key
from medusa_kit.serve.replicated.relay import SLACK, Forwarded, Relay, Source, forwarded
from medusa_kit.serve.replicated.replica import ReplicaState
from medusa_kit.settings.serve import ServeConfig
from medusa_kit.version import __version__

OWN_COUNTERS = ("medusa_kit_requests", "medusa_kit_queue_refusals")  # which the front counts
CREATED = "_created"  # times, which the parser takes for families of their own


class Pool(Protocol):
    """The replicas."""

    lost: tuple[type[BaseException], ...]  # what a call raises where its replica has died

    def ask(self, request: Forwarded) -> Source:
        """Send a request to one of them."""
        ...

    async def states(self) -> list[ReplicaState]:
        """The states of the replicas that answer in time."""
        ...

    async def running(self) -> int:
        """How many replicas there are."""
        ...


class Front:
    """`base`: the name of the model that all replicas have."""

    def __init__(
        self, pool: Pool, config: ServeConfig, base: str, keys: ApiKeys | None = None
    ) -> None:
        self.config, self.closing, self.failed = config, False, None
        self._pool, self._base = pool, base
        self._under_way: set[Relay] = set()
        self._metrics = Metrics()
        self.app = self._application()
        errors.install(self.app)
        guard(self.app, config, keys, self._metrics, config.host)

    @property
    def idle(self) -> bool:
        return not self._under_way

    def cancel(self) -> None:
        self.closing = True
        for relay in list(self._under_way):
            relay.cancel()

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a replica answer."""
        is_question = scope["method"] == "POST"
        if is_question and self.closing:
            raise ServerClosingError("the server is closing", code="closing")
        body = await HttpRequest(scope, receive).body()
        key = RoutingKey()
        if is_question:
            key = await self.app.state.turns.run(len(body), routing_key, body, self._base)
        timeout = self.config.request_timeout + SLACK
        relay = Relay(self._pool.ask, self._pool.lost, timeout)
        self._under_way.add(relay)
        try:
            await relay.run(forwarded(scope, body, key), scope, receive, send)
        finally:
            self._under_way.discard(relay)

    async def health(self) -> JSONResponse:
        running = await self._pool.running()
        reason = "closing" if self.closing else None if running else "no replica"
        content = {"status": reason or "ok", "replicas": running}
        return JSONResponse(content, 503 if reason else 200)

    async def metrics(self) -> Response:
        states = await self._pool.states()
        page = await asyncio.to_thread(merged_metrics, self._metrics.page(), states)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def batch(self) -> dict[str, Any]:
        parts = [state.batch for state in await self._pool.states()]
        totals = {name: sum(part[name] for part in parts) for name in (parts[0] if parts else {})}
        return {**totals, "replicas": len(parts)}

    def _application(self) -> FastAPI:
        app = FastAPI(
            title="medusa-kit", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
        )
        app.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        app.add_api_route("/metrics", self.metrics, response_class=Response)
        app.add_api_route("/v1/batch", self.batch)
        app.mount("/", self.forward)
        return app


def merged_metrics(own: bytes, states: Sequence[ReplicaState]) -> bytes:
    """The front's counters of requests, and all others of the replicas, by replica."""
    families: dict[str, Metric] = {}
    for family in text_string_to_metric_families(own.decode()):
        if family.name in OWN_COUNTERS:
            families[family.name] = family
    for state in states:
        for family in text_string_to_metric_families(state.metrics.decode()):
            if not family.name.startswith(OWN_COUNTERS) and not family.name.endswith(CREATED):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": state.name}
                    merged.add_sample(sample.name, labels, sample.value)
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
