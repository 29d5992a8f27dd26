"""The parts of a message's content: text alone, whatever the model was made to look at or hear."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import model_validator

from medusa_kit.serve.bounds import MAX_PARTS, Few
from medusa_kit.serve.labels import CacheBreakpoint, Fields


class UnsupportedFieldError(ValueError):
    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.param = name


class TextPart(Fields):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None  # changes nothing

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            raise UnsupportedFieldError(
                "type",
                f"a part of the content is {kind!r}, and this server decodes text only; expected "
                "parts of the type 'text'",
            )
        return data


Parts = Annotated[list[TextPart], Few(max_length=MAX_PARTS)]
