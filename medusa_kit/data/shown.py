"""Whether the chat template shows the model what a row says. It is found by rendering the row with
and without: what makes no difference would be dropped without a word."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from medusa_kit.data.rendered import Rendered, Span
from medusa_kit.data.row_keys import EXTRA_KEYS
from medusa_kit.data.rows import Message
from medusa_kit.errors import DataError

# Private characters, which neither templates nor rows have, at both ends: two texts then begin
# and cease to differ where the words do.
OTHER = "\ue000other\ue001"
NUMBERED = ("\ue000other", "\ue001")  # around the number of a message
MANY = 16  # messages from which on they are looked for together
OTHERS = ("content", "reasoning_content", "tool_calls")  # what a message is located by


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether messages are role and content alone."""
    return not any(key in message for message in messages for key in EXTRA_KEYS)


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


class Shown(NamedTuple):
    """Where each message is in the rendered text, and whether the template writes other words
    than those of the row, as templates do that leave out earlier thoughts."""

    spans: list[Span]
    is_edited: bool


def check_shown(view: Rendered, messages: Sequence[Message], text: str) -> Shown:
    """Raises DataError, naming it, for what the template leaves out of the rendered text."""
    thoughts = _check_extras(view, messages, text)
    known = _found_at_once(view, messages, text) if len(messages) >= MANY else {}
    spans = list[Span]()
    for index, message in enumerate(messages):
        if index in known:
            spans.append(known[index])
        elif not _words(message) and _text(view, _otherwise(messages, index)) == text:
            spans.append((spans[-1][1],) * 2 if spans else (0, 0))  # nothing is left out
        else:
            spans.append(message_span(view, messages, index, text))
    changed = view.as_text and any(
        _words(message) not in text[start:end]
        for message, (start, end) in zip(messages, spans, strict=True)
    )
    return Shown(spans, changed or not all(thoughts))


def _found_at_once(view: Rendered, messages: Sequence[Message], text: str) -> dict[int, Span]:
    """The characters of messages of role and content, by one rendering in which they all say
    something else: what stands between is the template's own. Empty where the text is not made of
    that and of what the messages say."""
    plain = [i for i, message in enumerate(messages) if not any(k in message for k in EXTRA_KEYS)]
    others = list(messages)
    for index in plain:
        others[index] = {**messages[index], "content": f"{NUMBERED[0]}{index}{NUMBERED[1]}"}
    other = _text(view, others) if view.as_text else None
    between, *pieces = re.split("{}(\\d+){}".format(*NUMBERED), other or "")
    if [int(number) for number in pieces[::2]] != plain or not text.startswith(between):
        return {}
    spans, start = dict[int, Span](), len(between)
    for index, between in zip(plain, pieces[1::2], strict=True):
        said = messages[index]["content"]
        fitting = [
            words
            for words in {said, said.strip(), said.lstrip(), said.rstrip()}
            if text.startswith(words, start) and text.startswith(between, start + len(words))
        ]
        if len(fitting) != 1:
            return {}
        spans[index] = (start, start + len(fitting[0]))
        start = spans[index][1] + len(between)
    return spans if start == len(text) else {}


def message_span(view: Rendered, messages: Sequence[Message], index: int, text: str) -> Span:
    """The characters of a message in the text: those that differ where it says something else.
    Raises DataError where the template leaves it out."""
    other = view.text(_otherwise(messages, index))
    if other == text:
        raise DataError(
            f"the chat template leaves out message {index + 1}, of the {messages[index]['role']}",
            hint="remove it from the row, or use a template that shows it",
        )
    start = common_start(text, other)
    return start, len(text) - common_start(text[start:][::-1], other[start:][::-1])


def _words(message: Message) -> str:
    return str(message.get("content") or "").strip()


def _otherwise(
    messages: Sequence[Message], index: int, keys: Sequence[str] = OTHERS
) -> list[Message]:
    """The messages, of which one says something else. Calls are still of the same function, as
    their results may be said to be."""
    message = messages[index]
    further = [key for key in keys if key in message and key != "content"]
    changes_words = "content" in keys and (
        _words(message) or not further
    )  # not beside calls, if it is empty
    other: Message = dict.fromkeys([*further, *(["content"] if changes_words else [])], OTHER)
    if "tool_calls" in other:
        other["tool_calls"] = [_other_call(call) for call in message["tool_calls"]]
    return [*messages[:index], {**message, **other}, *messages[index + 1 :]]


def _other_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments: Any = {OTHER: OTHER}
    if isinstance(call["function"]["arguments"], str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def common_start(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    if first.startswith(second) or second.startswith(first):
        return min(len(first), len(second))
    low, high = 0, min(len(first), len(second))  # alike up to low; not up to high
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _check_extras(view: Rendered, messages: Sequence[Message], text: str) -> list[bool]:
    """Raises DataError for tools, calls and names that are not shown, and where no reasoning is.
    Otherwise whether it is, for each message with some: templates leave out earlier turns'."""
    if view.tools:
        function = {"name": OTHER, "description": OTHER, "parameters": {"type": "object"}}
        others = Rendered(view.tokenizer, [{"type": "function", "function": function}])
        if _text(others, messages) == text:
            raise _not_shown("the row's tools")
    called = {call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    thoughts = []
    for index, message in enumerate(messages):
        named_by_call = message["role"] == "tool" and message.get("name") in called
        has_words_and_calls = "tool_calls" in message and _words(
            message
        )  # some templates leave it out then
        for key in (*EXTRA_KEYS, *(["content"] if has_words_and_calls else [])):
            if key not in message or (key == "name" and named_by_call):
                continue
            is_shown = _text(view, _otherwise(messages, index, [key])) != text
            if key == "reasoning_content":
                thoughts.append(is_shown)
            elif not is_shown:
                raise _not_shown(f"{key!r} of message {index + 1}")
    if thoughts and not any(thoughts):
        raise _not_shown("reasoning_content")
    return thoughts


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
