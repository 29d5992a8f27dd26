"""API keys: who may ask. Only their digests are kept, so that no log or error can show a key."""

import hmac
import os
import stat
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from medusa_kit import console
from medusa_kit.errors import ConfigError
from medusa_kit.paths import expanded
from medusa_kit.serve.operations.refusal import refuse

VARIABLE = "MEDUSA_KIT_API_KEYS"
OPEN_PATHS = frozenset({"/health", "/"})  # the page is where a key is entered
OPEN_FOLDER = "/page/"
HINT = "send the header Authorization: Bearer KEY"


class ApiKeys:
    """Keys that are accepted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def accept(self, key: bytes) -> bool:
        """Takes as long whichever key it is, and whatever it begins with."""
        given, accepted = sha256(key).digest(), False
        for known in self._digests:
            accepted |= hmac.compare_digest(known, given)
        return accepted


def load_keys(path: str | None, environ: Mapping[str, str] = os.environ) -> ApiKeys | None:
    """The keys of the environment and of the file; None where neither is given."""
    keys: list[str] = []
    listed = environ.get(VARIABLE)
    if listed is not None:
        keys += _checked([key.strip() for key in listed.split(",")], VARIABLE)
    if path is not None:
        keys += _checked([line.strip() for line in _read(expanded(path)).splitlines()], path)
    return ApiKeys(list(dict.fromkeys(keys))) if keys else None


def _read(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"api_key_file {str(path)!r} cannot be read: {error.strerror}",
            hint="give a text file with a key on each line",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"api_key_file {str(path)!r} is no ASCII text; expected a key on each line"
        ) from None
    if os.name == "posix" and mode & stat.S_IROTH:
        console.warn(f"every user of this machine can read {path}; chmod 600 {path} prevents that")
    return text


def _checked(keys: list[str], source: str) -> list[str]:
    """The keys without blank ones. A faulty key is named by its number: messages are logged."""
    for number, key in enumerate(keys, start=1):
        if not all("!" <= character <= "~" for character in key):
            raise ConfigError(
                f"key {number} of {source} has a blank or a control character inside; "
                "expected printable ASCII"
            )
    usable = [key for key in keys if key]
    if not usable:
        raise ConfigError(
            f"{source} has no key; expected at least one",
            hint="without keys, leave it out: then none is asked for",
        )
    return usable


class KeyMiddleware:
    """Answers 401 unless a request has one of `keys`, or is for the page or /health."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope):
            return await self.app(scope, receive, send)
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        key = _bearer(given[0]) if len(given) == 1 else None
        if key is not None and self.keys.accept(key):
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        reason = "no API key was given" if not given else "the API key is not accepted"
        await refuse(
            send,
            401,
            f"{reason}; {HINT}",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )


def _is_open(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    path = scope["path"]
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _bearer(value: bytes) -> bytes | None:
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None
