"""Everything that stands between a client and the app, in the order in which it must."""

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from medusa_kit import console
from medusa_kit.serve.operations.bodies import Turns
from medusa_kit.serve.operations.health import Reason
from medusa_kit.serve.operations.hosts import ALL, HostMiddleware, is_loopback
from medusa_kit.serve.operations.keys import ApiKeys, KeyMiddleware
from medusa_kit.serve.operations.limits import LimitsMiddleware
from medusa_kit.serve.operations.logs import LogMiddleware
from medusa_kit.serve.operations.metrics import Metrics, MetricsMiddleware
from medusa_kit.settings.serve_limits import LimitOptions


def guard(
    app: Starlette,
    options: LimitOptions,
    keys: ApiKeys | None,
    metrics: Metrics,
    host: str | None = None,
    not_ready: Reason | None = None,
) -> None:
    """Put keys, limits, CORS, names, counters and the log around `app`. What is added later lies
    further out: a request is logged and counted whatever becomes of it, a browser may ask for
    permission without a key, and nobody without one can send a body. `host`: that is listened on;
    `not_ready`: as in health.py."""
    app.state.turns = Turns()
    app.add_middleware(
        LimitsMiddleware, options=options, turns=app.state.turns, not_ready=not_ready
    )
    if keys is not None:
        app.add_middleware(KeyMiddleware, keys=keys)
    if options.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # no cookies are used
            expose_headers=["x-request-id", "retry-after"],
        )
    local = keys is None and host is not None and is_loopback(host)
    if (local or options.hosts) and ALL not in options.hosts:
        app.add_middleware(HostMiddleware, allowed=(host or "localhost", *options.hosts))
    app.add_middleware(MetricsMiddleware, metrics=metrics)
    app.add_middleware(LogMiddleware, form=options.log_format)


def warn_of_open_server(host: str, keys: ApiKeys | None) -> None:
    """Where other machines can ask, and need no key."""
    if keys is None and not is_loopback(host):
        console.warn(
            f"the server listens on {host} and asks for no key: everyone who can reach it may use "
            "it (--api-key-file, or MEDUSA_KIT_API_KEYS)"
        )
