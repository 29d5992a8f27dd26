"""The application: routes, errors, middleware around one service."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware import Middleware

from medusa_kit.serve import chat, completions, errors, page
from medusa_kit.serve.operations.guard import guard
from medusa_kit.serve.operations.health import operations
from medusa_kit.serve.operations.keys import ApiKeys
from medusa_kit.serve.service import Service
from medusa_kit.serve.streaming import service_of
from medusa_kit.version import __version__

general = APIRouter()
ROUTERS: Sequence[APIRouter] = (chat.router, completions.router, general, page.router)


@general.get("/v1/models")
@general.get("/v1/models/", include_in_schema=False)  # else it is the model without a name
async def models(request: Request) -> dict[str, Any]:
    """The names that `model` may have."""
    service = service_of(request)
    entries = await service.read(service.names.entries)
    return {"object": "list", "data": entries}


@general.get("/v1/models/{model:path}")
async def model(model: str, request: Request) -> dict[str, Any]:
    """What is known of one of them."""
    service = service_of(request)
    return await service.read(service.names.entry, model)


@general.get("/v1/batch")
async def batch(request: Request) -> dict[str, Any]:
    """How full the batch is, and how fast."""
    return batch_state(service_of(request))


def batch_state(service: Service) -> dict[str, Any]:
    stats = service.stats
    return {
        "rows": stats.running,
        "reading": stats.reading,
        "waiting": stats.waiting,
        "nodes": stats.nodes,
        "max_rows": service.config.max_rows,
        "tokens_per_second": service.tokens_per_second,
    }


def create_app(
    service: Service,
    routers: Sequence[APIRouter] = (),
    middleware: Sequence[Middleware] = (),
    keys: ApiKeys | None = None,
) -> FastAPI:
    """The server's application. `routers` come after its own, `middleware` inside of its own;
    `keys`: one of which each request must have. The service is closed with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close(drain=service.idle)

    app = FastAPI(
        title="medusa-kit", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        middleware=list(middleware), responses=errors.RESPONSES,
    )  # fmt: skip
    app.state.service = service
    errors.install(app)
    for router in (*ROUTERS, *routers):
        app.include_router(router)
    app.include_router(operations(service.metrics, service.not_ready))
    guard(app, service.config, keys, service.metrics, service.config.host, service.not_ready)
    return app
