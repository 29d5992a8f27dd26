"""Bodies are parsed and validated in a thread, one large one at a time.

Both are Python's work for the most part, so that the loop and the batch go on beside it.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from medusa_kit.files import parse_json
from medusa_kit.garbage import no_search
from medusa_kit.serve.operations.bodies import SMALL
from medusa_kit.serve.operations.given import Given

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyRoute(APIRoute):
    """The route class of routers whose endpoints take one model. Bodies wait for their turn in
    `app.state.turns`."""

    def get_route_handler(self) -> Handler:
        answer, model = super().get_route_handler(), _model_of(self.endpoint)
        if model is None:
            return answer
        body_model = model

        async def handler(request: Request) -> Response:
            body = await request.body()
            if len(body) <= SMALL or not _is_json(request.headers.get("content-type", "")):
                return await answer(request)
            read = await request.app.state.turns.run(len(body), _read, body, body_model)
            return await answer(_ReadRequest(request, read))

        return handler


class _ReadRequest(Request):
    """A request whose body has been read; FastAPI passes the model on as it is."""

    def __init__(self, request: Request, read: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._read = read

    async def body(self) -> bytes:
        return b"read"

    async def json(self) -> Any:
        return self._read


def _model_of(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    kinds = get_type_hints(endpoint).values()
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None
    )


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _read(body: bytes, model: type[BaseModel]) -> BaseModel:
    """The model in a body. Raises what FastAPI would."""
    try:
        with no_search():  # each search would look through all that has been parsed so far
            return model.model_validate(parse_json(body))
    except json.JSONDecodeError as error:
        why = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([why]) from None
    except ValidationError as error:
        errors = [
            # so that the body is freed
            {**detail, "loc": ("body", *detail["loc"]), "input": Given.of(detail["input"])}
            for detail in error.errors(include_url=False)
        ]
        raise RequestValidationError(errors) from None
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "There was an error parsing the body") from error
