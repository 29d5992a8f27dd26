"""The ways in which chat templates take the thoughts of a message: under several names, or as parts
of its content."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Message = Mapping[str, Any]

KEY = "reasoning_content"  # of a message, as clients and rows have it


class Thoughts(NamedTuple):
    """`opening`: what the model writes before its thoughts, or the template for it; `closing`: what
    follows them; `aloud`: what the model writes between that and the words of its answer, with or
    without thoughts before. `way`: how the template takes the thoughts of a message, if it does.
    `call`: what the model writes before the name of a function, behind `closing`."""

    opening: str
    closing: str
    aloud: str = ""
    way: str | None = None
    call: str = ""


def _parts(message: Message) -> Message:
    parts = [{"type": "thinking", "thinking": message[KEY]}]
    if message.get("content"):
        parts.append({"type": "text", "text": message["content"]})
    return {**_without(message), "content": parts}


def _blocks(message: Message) -> Message:
    blocks = [{"type": "thoughts", "text": message[KEY]}] if message.get(KEY) else []
    blocks.append({"type": "response", "text": message.get("content") or ""})
    return {**_without(message), "content": {"blocks": blocks}}


def _without(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != KEY}


def _key(name: str) -> Callable[[Message], Message]:
    return lambda message: {**_without(message), name: message[KEY]}


WAYS: dict[str, Callable[[Message], Message]] = {
    **{name: _key(name) for name in (KEY, "reasoning", "thinking")},
    "parts": _parts,
    "blocks": _blocks,
}
