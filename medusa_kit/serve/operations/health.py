"""/health and /metrics."""

from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from medusa_kit.serve.operations.metrics import Metrics

Reason = Callable[[], str | None]


def operations(metrics: Metrics, not_ready: Reason) -> APIRouter:
    """`not_ready`: why requests cannot be answered now, "closing" for example, or None."""
    router = APIRouter(tags=["operations"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses={503: {"description": "not ready: closing, for example"}})
    async def health() -> JSONResponse:
        """Whether requests are answered. Needs no key."""
        reason = not_ready()
        return JSONResponse({"status": reason or "ok"}, 503 if reason else 200)

    @router.get("/metrics", response_class=Response)
    def page() -> Response:
        """Counters for Prometheus."""
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    del health, page
    return router
