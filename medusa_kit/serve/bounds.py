"""How much a field of a request may hold. A list ends with its first fault: pydantic would collect
millions of them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from medusa_kit.serve.labels import MAX_FIELDS

MAX_ANSWERS = MAX_TOOLS = 128  # OpenAI's; calls of a message are as many
MAX_MESSAGES = MAX_PARTS = MAX_PROMPTS = 4096
MAX_BIASES = 10_000
MAX_TOKEN_IDS = 400_000
MAX_OF_A_STOP = 1000  # characters

Few = partial(Field, fail_fast=True)
ModelName = Annotated[str, Field(max_length=512)]
Named = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)]
Biases = Annotated[dict[int, float], Field(max_length=MAX_BIASES)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_OF_A_STOP)]
Stops = Annotated[list[Stop], Few(max_length=16)]
TokenIds = Annotated[list[int], Few(min_length=1, max_length=MAX_TOKEN_IDS)]
Texts = Annotated[list[str], Few(max_length=MAX_PROMPTS)]
ManyIds = Annotated[list[TokenIds], Few(max_length=MAX_PROMPTS)]


def texts(whole: Any) -> Iterator[str]:
    """All texts in a JSON value; most of a long list are numbers."""
    remaining = [whole]
    while remaining:
        value = remaining.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            remaining += [*value, *value.values()]
        elif isinstance(value, list):
            remaining += [part for part in value if isinstance(part, str | list | dict)]
