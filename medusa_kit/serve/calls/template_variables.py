"""What a request gives the chat template besides messages and tools."""

import inspect
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from medusa_kit.errors import ConfigError

FIELD, EFFORT = "chat_template_kwargs", "reasoning_effort"


def template_variables(
    given: Mapping[str, Any] | None, effort: str | None, template: str
) -> dict[str, Any]:
    """Raises ConfigError for names that the server sets itself, and for an effort that the template
    does not read."""
    variables = dict(given or {})
    for name in variables:
        if name in _taken():
            raise ConfigError(
                f"{FIELD}.{name} is set by the server; expected variables of the chat template",
                hint="messages, tools and the rest have fields of their own",
            )
    if effort is None:
        return variables
    if EFFORT in variables:
        raise ConfigError(f"{EFFORT} is given in {FIELD} too", hint="give it once")
    if not re.search(rf"\b{EFFORT}\b", template):
        raise ConfigError(
            f"{EFFORT} {effort!r} has no effect, since this model's chat template does not read it",
            hint="leave it out",
        )
    return {**variables, EFFORT: effort}


@cache
def _taken() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    named = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({*named, "messages", "self"} - {"documents", "kwargs"})
