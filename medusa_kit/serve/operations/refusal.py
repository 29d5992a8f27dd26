"""An error that is answered before the app sees the request, in the form of OpenAI's API."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send


async def refuse(
    send: Send,
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    more = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    start: dict[str, Any] = {
        "type": "http.response.start",
        "status": status,
        "headers": [(name.encode(), value.encode()) for name, value in more.items()],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})
