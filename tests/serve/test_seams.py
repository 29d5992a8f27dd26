"""What other parts of the server plug into: names, routers, middleware."""

from collections.abc import Mapping
from typing import Any

import openai
import pytest
from fastapi import APIRouter
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from support.serving.live_server import LiveServer, live_server

from medusa_kit.engine.engine import Engine
from medusa_kit.serve.models import RequestedModel, ServedModels


class Refusing:
    """Middleware that answers every path with `secret` in it."""

    def __init__(self, app: ASGIApp, status: int) -> None:
        self.app, self.status = app, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "secret" not in scope.get("path", ""):
            return await self.app(scope, receive, send)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def test_routers_and_middleware(engine: Engine) -> None:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    more: dict[str, Any] = {"routers": [router], "middleware": [Middleware(Refusing, status=418)]}
    with live_server(engine, app=more) as live, live.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/secret").status_code == 418


class TwoNames(ServedModels):
    def requested(self, model: str | None, *fields: str | None) -> RequestedModel:
        if model == f"{self.names[0]}:plain":
            return RequestedModel(model)
        return super().requested(model, *fields)

    async def ready(self, model: str | None, *fields: str | None) -> Mapping[str, Any]:
        return {"drafter": "none"} if model == f"{self.names[0]}:plain" else {}


def test_a_name_may_mean_options_of_the_batch(engine: Engine) -> None:
    with live_server(engine) as live, live.client() as client:
        live.service.names = TwoNames(engine, [live.model], None, 0)
        requested = f"{live.model}:plain"
        answer = client.completions.create(model=requested, prompt="a", max_tokens=4, temperature=0)
        assert answer.usage.model_extra["medusa_kit"]["drafter"] == "none"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")


def test_the_meter(live: LiveServer) -> None:
    with live.http() as http:
        http.post("/v1/completions", json={"model": live.model, "prompt": "a", "max_tokens": 8})
        told = http.get("/v1/batch").json()
    assert told["max_rows"] == 4
    assert told["tokens_per_second"] > 0
    assert set(told) == {"rows", "reading", "waiting", "nodes", "max_rows", "tokens_per_second"}
