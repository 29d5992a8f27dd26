"""`medusa-kit serve --replicas`: what must be there, and the server before the replicas."""

import importlib.util
import socket
from collections.abc import Mapping
from typing import Any

from medusa_kit import console
from medusa_kit.errors import ConfigError, UsageError
from medusa_kit.installing import extra
from medusa_kit.serve.operations.keys import ApiKeys
from medusa_kit.serve.replicated.front import Front
from medusa_kit.serve.server import first_lines, listen, server_for, url_of
from medusa_kit.settings.serve import ServeConfig


def check_ray(address: str | None) -> None:
    """Before anything starts: Ray itself tries for minutes to reach a cluster."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--replicas needs the package ray", hint=extra("ray"))
    if address in (None, "auto"):
        return
    host, _, port = str(address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray_address {address!r} cannot be reached: {error}", hint="ray start --head"
        ) from error


def run_replicas(
    loading: Mapping[str, Any], config: ServeConfig, keys: ApiKeys | None, bound: socket.socket
) -> None:
    """Serve until the end. `loading`: what each replica loads."""
    from medusa_kit.serve.replicated.ray_pool import ray_pool

    with ray_pool(loading, config) as (pool, base):
        front = Front(pool, config, base, keys)
        each = f"{config.max_rows} requests at once each"
        scaling = f"{config.replicas} to {config.max_replicas}" if config.max_replicas else None
        lines = first_lines(base, url_of(bound), f"{scaling or config.replicas} replicas, {each}")
        server = server_for(front.app, front, lambda: console.note(lines))
        listen(server, config, bound)
    console.note("the server has ended")
