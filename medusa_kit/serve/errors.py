"""What went wrong, as OpenAI's clients expect it: a status, and {"error": {…}} as the body."""

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from medusa_kit import console
from medusa_kit.errors import (
    ClosedError,
    ContextLengthError,
    DataError,
    DeviceMemoryError,
    HubError,
    MedusaKitError,
    NotFiniteError,
    QueueFullError,
    UnknownModelError,
    UsageError,
)
from medusa_kit.serve.hints import message_for_client
from medusa_kit.serve.invalid import FIELDS, explain_invalid
from medusa_kit.shown import shown

RETRY_SECONDS = 1
MAX_OF_A_MESSAGE, MAX_OF_A_NAME = 2000, 500  # characters
NO_MODEL = "'model' is missing"
NESTED = "the body is nested too deeply: objects and lists in one another, hundreds of them"
BLAMED = re.compile(r"(?:field of )?(([a-z_]+)(?:[.[][^ :]*)?)")  # how messages about values begin


class RequestError(MedusaKitError):
    """A request that cannot be answered. `param`: the field that is to blame."""

    status = 400

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None,
        hint: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, hint=hint)
        self.param, self.code = param, code


class NoSuchModelError(RequestError):
    status = 404


class RequestTimeoutError(RequestError):
    status = 504


class ServerClosingError(RequestError):
    status = 503


# (kind, status, type in OpenAI's words, code), the first that fits
TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (UnknownModelError, 404, "not_found_error", "model_not_found"),
    (UsageError, 400, "invalid_request_error", None),
    (DataError, 400, "invalid_request_error", None),
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (ClosedError, 503, "service_unavailable_error", "closing"),
    (RecursionError, 400, "invalid_request_error", None),
    (HubError, 503, "service_unavailable_error", "hub_unavailable"),
    (DeviceMemoryError, 503, "service_unavailable_error", "out_of_memory"),
    (NotFiniteError, 500, "server_error", "not_finite"),
)
TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
         404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error",
         503: "service_unavailable_error", 504: "timeout_error"}  # fmt: skip


def described(error: BaseException) -> tuple[int, dict[str, Any]]:
    """(status, body) for what was raised while a request was served."""
    if isinstance(error, RequestError):
        kind = TYPES.get(error.status, "server_error")
        return error.status, body(str(error), kind, error.param, error.code)
    for error_class, status, kind, code in TABLE:
        if isinstance(error, error_class):
            if status == 500:
                console.warn(f"a request failed: {error}")
            return status, body(_message_of(error), kind, field_of(error), code)
    console.warn(f"a request failed: {type(error).__name__}: {error}")
    return 500, body("the server failed; see its log", "server_error", None, None)


def _message_of(error: BaseException) -> str:
    if isinstance(error, ClosedError):  # whose own words may be of what ended the batch
        return "the server takes no more requests"
    if not isinstance(error, MedusaKitError):
        return NESTED
    # Clients know it by these words: langchain, litellm and others look for "prompt is too long".
    longer = "the prompt is too long: " if isinstance(error, ContextLengthError) else ""
    return longer + message_for_client(error)


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetails


# For the OpenAPI document.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The request cannot be answered; `param` is the field to blame.",
        404: "There is no such model.",
        415: "The Content-Type is not application/json.",
        429: "Too many requests wait.",
        500: "The server failed.",
        503: "The server is closing or out of memory, or the Hub cannot be reached.",
        504: "The request took too long.",
    }.items()
}


def body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The body of an error. A long message is cut in the middle: a client knows the value that it
    names."""
    if len(message) > MAX_OF_A_MESSAGE:
        message = f"{message[: MAX_OF_A_MESSAGE // 2]} … {message[-MAX_OF_A_MESSAGE // 2 :]}"
    param = param and param[:MAX_OF_A_NAME]
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def response(status: int, content: dict[str, Any]) -> JSONResponse:
    """The response with an error. One that is worth another try says when."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
    return JSONResponse(content, status, headers)


def field_of(error: Exception) -> str | None:
    """The request's field that is to blame: messages about a value begin with its name."""
    if isinstance(error, DataError):
        return "messages"  # that the chat template refuses
    if isinstance(error, UnknownModelError):
        return "model"
    match = BLAMED.match(str(error))
    whole, first = match.groups() if match else ("", "")
    if first == "token":  # an id that the model does not have
        return "prompt"
    if first in ("drafter", "drafter_options"):
        return "medusa_kit"
    return whole if first in FIELDS else None


def _wrong_kind(content_type: str) -> tuple[int, str, None]:
    """(status, message, field) for a body that was not read, since it is not sent as JSON."""
    if not content_type:
        return 400, "the header Content-Type is missing; expected application/json", None
    message = f"the header Content-Type is {shown(content_type)}; expected application/json"
    return 415, message, None


def _unread(cause: BaseException | None) -> str | None:
    """Why a body could not be read as JSON."""
    if isinstance(cause, RecursionError):
        return NESTED
    return "the body is no JSON: it is not UTF-8" if isinstance(cause, UnicodeError) else None


async def _served(request: Request) -> str:
    """What to name, behind the message that no model is named."""
    service = getattr(request.app.state, "service", None)
    if service is None:
        return ""
    entries = await service.read(service.names.entries)
    return f"; expected {entries[0]['id']!r}, which is served here"


def install(app: FastAPI) -> None:
    """Every error leaves the server in OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        unread = isinstance(error.body, bytes) and error.body
        refused = _wrong_kind(request.headers.get("content-type", "")) if unread else None
        status, message, param = refused or (400, *explain_invalid(error.errors()))
        if message == NO_MODEL:
            message += await _served(request)
        return response(status, body(message, "invalid_request_error", param, None))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        kind = TYPES.get(error.status_code, "invalid_request_error")
        message = _unread(error.__cause__) or str(error.detail)
        answer = response(error.status_code, body(message, kind, None, None))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RecursionError)
    @app.exception_handler(MedusaKitError)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return response(*described(error))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return response(*described(error))

    del invalid, refused, failed, unexpected
