"""What a request may say of how its answer is drafted."""

from collections.abc import Mapping
from typing import Any

from medusa_kit.serve.errors import RequestError
from medusa_kit.serve.schema import KitFields

FORBIDDEN = ("store", "draft_model")  # options that name files and models of the server's machine
MOST = 64  # nodes, tokens and the like of a drafter, since its neighbours share the step


def check_drafting(fields: KitFields) -> None:
    """Raises RequestError for options of a drafter that a request must not set."""
    _check_options(fields.drafter_options or {})


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in FORBIDDEN:
            raise RequestError(
                f"drafter_options: {name!r} names what lies on the server, and cannot be set by a "
                "request",
                param="medusa_kit",
            )
        if isinstance(value, int) and value > MOST:
            raise RequestError(
                f"drafter_options: {name} {value} is out of range; a request may ask for {MOST} "
                "at most",
                param="medusa_kit",
            )
        if isinstance(value, Mapping):
            _check_options(value)
