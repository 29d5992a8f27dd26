"""Which names requests may call the server by.

A page of another site can have its own name resolve to 127.0.0.1, and then call a server there as
if it were its own. Its requests still have that name in the header Host.
"""

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from medusa_kit.serve.operations.refusal import refuse

LOCAL = ("localhost", "127.0.0.1", "[::1]")
ALL = "*"
FORM = re.compile(r"(\[[^\[\]]*\]|[^:\[\]@/\s]+)(?::[0-9]*)?")
MAX_SHOWN = 100  # characters of a name that is refused


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    name = host.strip().strip("[]").lower()
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name.rstrip(".") == "localhost"


def host_of(value: str) -> str | None:
    """The name or address in a header Host, without its port; None where it is malformed."""
    if (match := FORM.fullmatch(value.strip())) is None:
        return None
    return _normal(match[1])


def _normal(name: str) -> str:
    """A name in lower case; an address as it is usually written, of version 6 in brackets."""
    name = name.strip().lower()
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.removesuffix(".")
    return f"[{address}]" if address.version == 6 else str(address)


class HostMiddleware:
    """Answers 403 to requests whose header Host is neither local nor one of `allowed`."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self.app = app
        self._allowed = frozenset(map(_normal, (*LOCAL, *allowed)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        given = [value for name, value in scope["headers"] if name == b"host"]
        host = host_of(given[0].decode("latin-1")) if len(given) == 1 else None
        if host in self._allowed:
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        shown = ascii(given[0].decode("latin-1")[:MAX_SHOWN]) if given else "missing"
        await refuse(
            send,
            403,
            f"the header Host is {shown}, which is no name of this server; the server's option "
            "--allowed-hosts adds names",
            kind="permission_error",
            code="host_not_allowed",
            headers={"Connection": "close"},
        )
