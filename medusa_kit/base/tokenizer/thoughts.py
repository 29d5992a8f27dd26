"""What a model says to itself, as its chat template writes it."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from medusa_kit.base.tokenizer.bounded_rendering import bounded
from medusa_kit.base.tokenizer.thought_marks import find_thoughts
from medusa_kit.base.tokenizer.thought_ways import KEY, WAYS, Message, Thoughts
from medusa_kit.errors import DataError

_known: WeakKeyDictionary[Any, tuple[Any, Thoughts | None]] = WeakKeyDictionary()


def thoughts_of(tokenizer: Any) -> Thoughts | None:
    """How the chat template writes thoughts; None where it has none, or none are found."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    known = _known.get(tokenizer)
    if known is None or known[0] != template:
        found = None
        with suppress(DataError):  # a template that runs or writes for ever
            found = bounded(template, lambda: find_thoughts(tokenizer))
        known = _known[tokenizer] = (template, found)
    return known[1]


def with_thoughts(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """The messages with their thoughts where the chat template takes them."""
    found = thoughts_of(tokenizer)
    way = None if found is None else found.way
    if way is None or way == KEY:
        return list(messages)
    given = []
    for message in messages:
        # A template that takes blocks takes them of all answers or of none.
        changes = message.get("role") == "assistant" and (message.get(KEY) or way == "blocks")
        given.append(WAYS[way](message) if changes else message)
    return given
