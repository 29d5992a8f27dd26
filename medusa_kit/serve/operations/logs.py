"""A line for each request on stderr, which a full disk, a closed pipe or a reader that stalls can
lose, but not stop the server with."""

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from queue import Full, Queue
from typing import Any, TextIO
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_kit.settings.serve_limits import LogFormat

MAX_LINES = 10_000  # that wait to be written
MAX_NOTES = 8  # of a line
POLLED = ("GET", "/v1/batch", 200)  # not logged: an open page asks each second
PATIENCE = 1.0  # seconds that the end waits for them


class LineWriter:
    """A thread that writes lines to `stream`, stderr unless given; what cannot be written is
    counted, and the count is written once lines can be written again."""

    def __init__(self, stream: TextIO | None = None, max_lines: int = MAX_LINES) -> None:
        self._given = stream
        self._queue: Queue[str] = Queue(max_lines)
        self._lost = self.written_or_lost = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="medusa-kit log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Never waits, never raises."""
        try:
            self._queue.put_nowait(line)
        except Full:
            self._lost += 1

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._closing.set()
        self.write("")
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            line = self._queue.get()
            if not line:
                continue
            lost, self._lost = self._lost, 0
            if lost:
                line = f"{lost} lines could not be written\n{line}"
            if not self._put(line):
                self._lost += lost + 1
            self.written_or_lost += 1

    def _put(self, line: str) -> bool:
        stream = self._given or sys.stderr
        try:
            stream.write(line + "\n")
            stream.flush()
        except (OSError, ValueError, AttributeError):  # full, closed, or none at all
            return False
        return True


@cache
def stderr_writer() -> LineWriter:
    """The writer of the process, whose end waits for its last lines."""
    writer = LineWriter()
    atexit.register(writer.close)
    return writer


class LogMiddleware:
    """Gives each request an id (the answer's header x-request-id), and logs it at its end."""

    def __init__(
        self, app: ASGIApp, form: LogFormat, write: Callable[[str], None] | None = None
    ) -> None:
        self.app, self.form = app, form
        self.write = write or (stderr_writer().write if form != "none" else _nothing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, request_id, status = time.monotonic(), uuid4().hex, 0
        scope.setdefault("state", {})["request_id"] = request_id

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except BaseException:
            status = status or 500
            raise
        finally:
            if (scope["method"], scope["path"], status) != POLLED:
                self.write(_line(self.form, scope, status, time.monotonic() - start, request_id))


def _line(form: LogFormat, scope: Scope, status: int, seconds: float, request_id: str) -> str:
    """Neither keys nor query nor body: they may be private. Of a body's schemas, notes say which
    parts were left out."""
    client = scope.get("client")
    fields: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "method": scope["method"],
        "path": scope["path"],
        "status": status or None,
        "seconds": round(seconds, 3),
        "client": client[0] if client else None,
        "id": request_id,
    }
    notes = list(scope.get("state", {}).get("notes", ()))[:MAX_NOTES]
    if notes:
        fields["notes"] = notes
    if form == "json":
        return json.dumps(fields)
    path = json.dumps(fields["path"])[1:-1]  # no line breaks of a client's choice
    return (
        f"{fields['time']} {fields['method']} {path} {status or 'gone'} {seconds:.3f} s "
        f"{fields['client']} {request_id}" + "".join(f" ({note})" for note in notes)
    )


def _nothing(line: str) -> None:
    pass
