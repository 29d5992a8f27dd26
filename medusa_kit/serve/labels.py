"""What a request may say that changes no answer: labels, and hints at how to serve it. They are
checked, so that nobody is left to believe in a misspelt one.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from medusa_kit.shown import shown_json

MAX_FIELDS = 100  # of an object
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # OpenAI's, of metadata


class Fields(BaseModel):
    # No number is NaN or infinite, and nothing is converted: "5" is no number.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, data: Any) -> Any:
        """pydantic has an error for each unknown one."""
        if isinstance(data, Mapping) and len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data)} fields are given; expected at most {MAX_FIELDS}")
        return data


Lifetime = Literal["30m", "12h", "24h"]  # of a prompt in a cache


class CacheBreakpoint(Fields):
    mode: Literal["explicit"]
    ttl: Lifetime | None = None


def _pairs(value: Any) -> Any:
    fits = isinstance(value, Mapping) and len(value) <= MAX_PAIRS
    if not fits or not all(
        isinstance(text, str) and len(key) <= MAX_KEY and len(text) <= MAX_VALUE
        for key, text in value.items()
    ):
        raise ValueError(
            f"metadata {shown_json(value)}: expected up to {MAX_PAIRS} pairs of text, with keys of "
            f"up to {MAX_KEY} characters and values of up to {MAX_VALUE}"
        )
    return value


Metadata = Annotated[dict[str, str], Field(max_length=MAX_PAIRS)]
Label = Annotated[str, Field(max_length=MAX_VALUE)]


class CacheOptions(Fields):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Lifetime | None = None


class Labels(Fields):
    """Fields that change nothing: what a request is called, and how it might be served."""

    user: Label | None = None
    safety_identifier: Annotated[str, Field(max_length=128)] | None = None  # OpenAI's limit
    metadata: Annotated[Metadata | None, BeforeValidator(_pairs)] = None
    store: bool = False  # the log says that nothing is stored
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
