"""Whether the chat template shows the model what a row says. It is found by rendering the row with
and without: what makes no difference would be dropped without a word."""

import json
from collections.abc import Sequence
from typing import Any

from medusa_kit.data.rendered import Rendered, Span
from medusa_kit.data.row_keys import SHOWN
from medusa_kit.data.rows import Message
from medusa_kit.errors import DataError

# Private characters, which neither templates nor rows have; at both ends, so that the places where
# texts begin and cease to differ are those of the words.
OTHER = "\ue000other\ue001"


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether messages are role and content alone."""
    return not any(key in message for message in messages for key in SHOWN)


def renderable(view: Rendered, messages: Sequence[Message]) -> tuple[list[Message], str]:
    """(messages as the template takes them, the text). Most templates write the arguments of calls
    as JSON, some take them as text. Raises DataError where it refuses both."""
    messages = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
    try:
        return messages, view.text(messages)
    except DataError:
        if not any("tool_calls" in message for message in messages):
            raise
        try:
            as_text = [_with_text_arguments(message) for message in messages]
            return as_text, view.text(as_text)
        except DataError:
            pass
        raise


def check_shown(view: Rendered, messages: Sequence[Message], text: str) -> list[Span]:
    """The place of each message in the rendered text. Raises DataError, naming it, for what the
    template leaves out."""
    _check_extras(view, messages, text)
    return [place(view, messages, index, text) for index in range(len(messages))]


def place(view: Rendered, messages: Sequence[Message], index: int, text: str) -> Span:
    """The place of a message: what differs where it says something else. Raises DataError where
    the template leaves it out."""
    other = view.text([*messages[:index], _other(messages[index]), *messages[index + 1 :]])
    if other == text:
        raise DataError(
            f"the chat template leaves out message {index + 1}, of the {messages[index]['role']}",
            hint="remove it from the row, or use a template that shows it",
        )
    start = common_start(text, other)
    return start, len(text) - common_start(text[start:][::-1], other[start:][::-1])


def _other(message: Message) -> Message:
    """The same with other words. Calls stay calls, since templates check that results have one."""
    other = {**message, "content": OTHER}
    other.pop("reasoning_content", None)
    if "tool_calls" in message:
        arguments: Any = {OTHER: OTHER}
        if any(isinstance(call["function"]["arguments"], str) for call in message["tool_calls"]):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": OTHER, "arguments": arguments}
        other["tool_calls"] = [{**call, "function": function} for call in message["tool_calls"]]
    return other


def common_start(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    low, high = 0, min(len(one), len(other))  # alike up to low; not up to high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _check_extras(view: Rendered, messages: Sequence[Message], text: str) -> None:
    if view.tools and _text(Rendered(view.tokenizer), messages) == text:
        raise _not_shown("the row's tools")
    reasoning = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    if reasoning != list(messages) and _text(view, reasoning) == text:
        raise _not_shown("reasoning_content")
    called = {call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    for index, message in enumerate(messages):
        keys = [key for key in ("tool_calls", "name") if key in message]
        if message["role"] == "tool" and message.get("name") in called:
            keys = []  # the call says it
        for key in keys:
            less = [*messages]
            less[index] = {k: v for k, v in message.items() if k != key}
            if _text(view, less) == text:
                raise _not_shown(f"{key!r} of message {index + 1}")


def _text(view: Rendered, messages: Sequence[Message]) -> str | None:
    try:
        return view.text(messages)
    except DataError:  # it needs what was left out
        return None


def _not_shown(what: str) -> DataError:
    return DataError(
        f"the chat template does not show {what}",
        hint="remove it from the row, or use a template that shows it",
    )


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
