"""Options of the server that bound what clients may do, defined once; ServeConfig has them all.

Nothing is imported here but the standard library, since `--help` is made from it.
"""

import dataclasses
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from medusa_kit.errors import ConfigError
from medusa_kit.settings.option import COUNT, SECONDS, check_fields

LogFormat = Literal["plain", "json", "none"]
MIB = 1024 * 1024
HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]|[0-9a-fA-F]*:[0-9a-fA-F:.]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Who may ask, and how much. Raises ConfigError for a value that is out of range."""

    api_key_file: Annotated[
        str | None,
        "File with the accepted API keys, one a line; also MEDUSA_KIT_API_KEYS, separated by "
        "commas; default: no key is asked for.",
    ] = None
    cors_origin: Annotated[
        str | None,
        "Web pages elsewhere that may call the server: origins as https://app.example, separated "
        "by commas, or * for all; default: none.",
    ] = None
    allowed_hosts: Annotated[
        str | None,
        "Names besides localhost and --host that requests may have in the header Host, separated "
        "by commas, or * for all. Others are refused where no key is asked for on a loopback "
        "address, and wherever this is given.",
    ] = None
    max_body: Annotated[int, "Largest body of a request in bytes; larger ones get 413.", COUNT] = (
        4 * MIB
    )
    body_timeout: Annotated[
        float,
        "Seconds in which a request's headers, and then its body, must arrive; else 408.",
        SECONDS,
    ] = 30.0
    send_timeout: Annotated[
        float, "Seconds that a client may leave an answer unread until it is cancelled.", SECONDS
    ] = 60.0
    max_connections: Annotated[
        int, "Connections at once; requests on further ones get 503 at once.", COUNT
    ] = 1024
    log_format: Annotated[
        LogFormat, "Lines about requests on stderr: {values}."
    ] = "plain"  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        self.origins, self.hosts  # noqa: B018 - raise

    @property
    def origins(self) -> list[str]:
        """The web pages that may call the server."""
        parts = [origin.strip().rstrip("/") for origin in (self.cors_origin or "").split(",")]
        origins = [origin for origin in parts if origin]
        if self.cors_origin is not None and not origins:
            raise ConfigError("cors_origin is empty; expected https://HOST or *")
        for origin in origins:
            if origin != "*":
                _check_origin(origin)
        return origins

    @property
    def hosts(self) -> list[str]:
        """More names that requests may call the server by."""
        parts = (host.strip() for host in (self.allowed_hosts or "").split(","))
        hosts = [host for host in parts if host]
        if self.allowed_hosts is not None and not hosts:
            raise ConfigError("allowed_hosts is empty; expected names such as chat.example, or *")
        for host in hosts:
            if host != "*" and not HOST.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts {host!r} is no name; expected one such as chat.example, or *",
                    hint="a name has neither scheme nor port nor path",
                )
        return hosts


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or f"{parts.scheme}://{parts.netloc}" != origin:
        raise ConfigError(
            f"cors_origin {origin!r} is no origin; expected https://HOST or *",
            hint="an origin has no path: https://app.example or http://localhost:3000",
        )
