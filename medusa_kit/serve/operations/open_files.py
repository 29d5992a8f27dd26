"""How many files the process may have open, of which each connection is one."""

from __future__ import annotations

import asyncio
import errno
import pkgutil
import time
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any

from medusa_kit import console, drafters
from medusa_kit.settings.serve import ServeConfig

RESERVE = 192  # files of the process besides connections: the model's, heads', logs'
SPARE = 64  # connections above the limit, which are answered 503
QUIET = 60.0  # seconds between two warnings that there are too many
IMPORTED = ("anyio._backends._asyncio", "jinja2.sandbox", "llguidance.hf")  # some not installed
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)


def with_room_for_connections(config: ServeConfig) -> ServeConfig:
    """Raise the soft limit as far as needed and allowed. Where that is not enough, fewer
    connections are taken, and a warning says so."""
    needed = config.max_connections + SPARE + RESERVE
    limit = _raise_limit(needed)
    if limit is None or limit >= needed:
        return config
    max_connections = max(1, limit - SPARE - RESERVE)
    console.warn(
        f"max_connections {config.max_connections} is lowered to {max_connections}: this process "
        f"may open {limit} files (ulimit -Hn, LimitNOFILE)"
    )
    return replace(config, max_connections=max_connections)


def _raise_limit(needed: int) -> int | None:
    """Raise the limit to so many files at least, where that is possible; returns the limit then.
    None: there is none, or it is not known."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    if soft != endless and soft < needed:
        soft = needed if hard == endless else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError):  # more than the system has
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == endless else soft


class QuietAboutFiles:
    """An exception handler for asyncio's loop, which would log a traceback for every connection
    that it cannot take."""

    def __init__(self) -> None:
        self._last_warning = -QUIET

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in OUT_OF_FILES:
            return loop.default_exception_handler(context)
        if time.monotonic() - self._last_warning >= QUIET:
            self._last_warning = time.monotonic()
            console.warn("no connection can be taken: this process has too many files open")


def import_all() -> None:
    """Import what requests need before the first one: an import opens files, which fails where too
    many are open."""
    for name in (*IMPORTED, *_inside(drafters.__name__, list(drafters.__path__))):
        with suppress(ModuleNotFoundError):
            import_module(name)


def _inside(package: str, paths: list[str]) -> list[str]:
    return [module.name for module in pkgutil.walk_packages(paths, f"{package}.")]
