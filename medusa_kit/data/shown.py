"""Whether the chat template shows the model what a row says. It is found by rendering the row with
and without: what makes no difference would be dropped without a word."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from medusa_kit.data import located
from medusa_kit.data.located import common_start, other_arguments, with_others
from medusa_kit.data.rendered import Rendered, Span
from medusa_kit.data.row_keys import EXTRA_KEYS
from medusa_kit.data.rows import Message
from medusa_kit.errors import DataError

OTHER = located.OTHER.format("")
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
    """The characters of messages by one rendering of others: of all, else of those of role and
    content. Empty where they are not found so."""
    everywhere = range(len(messages))
    plain = [index for index in everywhere if is_plain([messages[index]])]
    for indices in [everywhere] if len(plain) == len(messages) else [everywhere, plain]:
        others, parts = with_others(messages, {i: _other_keys(messages[i]) for i in indices})
        other = _text(view, others) if view.as_text else None
        if other is not None and (spans := located.spans_of(text, other, parts)):
            return spans
    return {}


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
    other: Message = dict.fromkeys(_other_keys(message, keys), OTHER)
    if "tool_calls" in other:
        other["tool_calls"] = [_other_call(call) for call in message["tool_calls"]]
    return [*messages[:index], {**message, **other}, *messages[index + 1 :]]


def _other_keys(message: Message, keys: Sequence[str] = OTHERS) -> list[str]:
    """Which of these keys are to say something else: of the content not beside calls, if it is
    empty."""
    further = [key for key in keys if key in message and key != "content"]
    changes_words = "content" in keys and (_words(message) or not further)
    return [*further, *(["content"] if changes_words else [])]


def _other_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = other_arguments(call["function"]["arguments"], OTHER)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _check_extras(view: Rendered, messages: Sequence[Message], text: str) -> list[bool]:
    """Raises DataError for tools, calls and names that are not shown, and where no reasoning is.
    Otherwise whether it is, for each message with some: templates leave out earlier turns'."""
    if view.tools:
        function = {"name": OTHER, "description": OTHER, "parameters": {"type": "object"}}
        others = Rendered(view.tokenizer, [{"type": "function", "function": function}])
        if _text(others, messages) == text:
            raise _not_shown("the row's tools")
    at_once = _shown_at_once(view, messages) if len(messages) >= MANY else {}
    thoughts = []
    for key, index in _extras(messages):
        is_shown = index in (among := at_once.get(key, ()))
        if not is_shown and not (among and key == "reasoning_content"):
            is_shown = _text(view, _otherwise(messages, index, [key])) != text
        if key == "reasoning_content":
            thoughts.append(is_shown)
        elif not is_shown:
            raise _not_shown(f"{key!r} of message {index + 1}")
    if thoughts and not any(thoughts):
        raise _not_shown("reasoning_content")
    return thoughts


def _extras(messages: Sequence[Message]) -> Iterator[tuple[str, int]]:
    """(key, number of the message) of what templates may leave out."""
    called = {call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    for index, message in enumerate(messages):
        named_by_call = message["role"] == "tool" and message.get("name") in called
        has_words_and_calls = "tool_calls" in message and _words(message)  # some leave it out then
        for key in (*EXTRA_KEYS, *(["content"] if has_words_and_calls else [])):
            if key in message and not (key == "name" and named_by_call):
                yield key, index


def _shown_at_once(view: Rendered, messages: Sequence[Message]) -> dict[str, set[int]]:
    """The messages of which each key is shown, by one rendering in which it says something else in
    all of them. Who is not among them may still be shown."""
    shown = dict[str, set[int]]()
    extras = list(_extras(messages)) if view.as_text else []
    for key in dict.fromkeys(key for key, _ in extras):
        which = {index: [key] for own, index in extras if own == key}
        others, parts = with_others(messages, which)
        numbers = located.shown_parts(_text(view, others) or "")
        shown[key] = {parts[number].message for number in numbers if number < len(parts)}
    return shown


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
