"""Rows as they are read: a conversation, an answer as token ids, or a row that cannot be used."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from medusa_kit.errors import DataError

# role and content, and where the row has them: tool_calls, tool_call_id, name, reasoning_content,
# weight (0: not trained on).
Message = dict[str, Any]
EXAMPLES = "docs/data.md has an example of every form that is read"


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form. `row` counts from 1, as an editor counts lines."""

    messages: list[Message]
    row: int
    id: str | None
    source: str
    category: str | None = None  # in MT-bench, Spec-Bench and sets in their form
    tools: list[dict[str, Any]] | None = None  # functions that the model is told of
    unused: tuple[str, ...] = ()  # keys of the row that mean nothing here, and are not harmless


@dataclass(frozen=True)
class AnswerRow:
    """An answer the base model wrote: its own tokens, the stop token included."""

    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str  # stop | length
    id: str | None
    row: int
    sampling: dict[str, Any] | None = None
    source: str = field(default="", compare=False)  # where it was read


@dataclass(frozen=True)
class BadRow:
    """A row of no known format, or one that says more than can be trained on, and the reason."""

    reason: str
    row: int
    source: str
    hint: str | None = None

    def error(self) -> DataError:
        return DataError(f"{self.source}:{self.row}: {self.reason}", hint=self.hint)


Row: TypeAlias = Conversation | AnswerRow


def kind_of(value: Any) -> str:
    """The type of a value in JSON's words, for messages."""
    kinds = {bool: "a boolean", str: "text", dict: "an object", list: "a list", bytes: "bytes",
             type(None): "null", int: "a number", float: "a number"}  # fmt: skip
    return kinds.get(type(value), f"of type {type(value).__name__}")


def text_of(content: Any) -> str:
    """The text of a message's content; parts of text are joined. Raises DataError for all else:
    a template would write null and numbers as Python has them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"content is {kind_of(content)}, expected text")
    for part in content:
        if not isinstance(part, dict):
            raise DataError(f"content has a part that is {kind_of(part)}, expected an object")
        if (kind := part.get("type", "text")) != "text":
            raise DataError(f"content has a part of type {kind!r}, expected text")
        if not isinstance(part.get("text"), str):
            raise DataError(f"the text of a part is {kind_of(part.get('text'))}, expected text")
    return "".join(part["text"] for part in content)
