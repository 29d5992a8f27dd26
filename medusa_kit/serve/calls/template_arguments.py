"""The form in which a chat template writes arguments one by one, found by rendering some."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from medusa_kit.base.tokenizer.thought_marks import MARK, cut_mark, num_common
from medusa_kit.serve.calls.argument_form import ArgumentForm

NAMES, VALUES = ("zukey", "zulater"), ("Zuvalue", "Zumore")
TWO = dict(zip(NAMES, VALUES, strict=True))
# What changes where a template does not write text as it is.
STRANGE = "Zu \"q\" 'a' \\ {b} & é [c] \n$d;"
# A value of each of TYPES, in their order.
TYPED = ("Zuvalue", 7312.5, True, None, {"zu": ["Zux", True]}, [{"zu": "Zux"}, 7])
Call = Callable[[Mapping[str, Any]], str]  # what follows the name of a call with these arguments


def argument_form(call: Call) -> ArgumentForm | None:
    """The form in which a template writes arguments; None: another, or in none that is known."""
    parts = _parts(call(TWO))
    if parts is None:
        return None
    before, head, between, same_head, end = parts
    closing = cut_mark(between[: num_common(between, end)]).rstrip()
    opening = between[len(closing) :]
    middle = before.removesuffix(opening.lstrip())
    # A call without arguments has the rest; white space does not count.
    rest = "".join((middle + end[len(closing) :]).split())
    if head != same_head or middle == before or "".join(call({}).split()) != rest:
        return None
    start = before + NAMES[0]
    heads, words = zip(*(_head_and_word(call, start, end, one) for one in TYPED), strict=True)
    if (
        None in heads
        or heads[0] != head
        or call({NAMES[0]: STRANGE}) != start + head + STRANGE + end
    ):
        return None
    false = "false" if words[2] == "true" else "False"
    form = ArgumentForm(opening, heads, closing, (words[2], false, words[3]))
    return form if re.match(rf"\s*({MARK})", closing) and _tells_apart(form) else None


def _tells_apart(form: ArgumentForm) -> bool:
    """Whether the text before a value says where the name ends, and of which types it is."""
    heads = [head.rstrip() for head in set(form.heads)]
    others = sum(one.startswith(other) for one in heads for other in heads) > len(heads)
    return bool(form.key_end.strip()) and not others


def _parts(text: str) -> list[str] | None:
    """A text without names and values of arguments: what precedes each, and what follows."""
    parts = []
    for word in (word for pair in TWO.items() for word in pair):
        part, found, text = text.partition(word)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _head_and_word(
    call: Call, start: str, end: str, value: Any
) -> tuple[str, str] | tuple[None, str]:
    """What stands before a value, and how it is written."""
    text = call({NAMES[0]: value})
    inner = text[len(start) : len(text) - len(end)]
    compact = json.dumps(value, separators=(",", ":"))
    for written in (str(value), json.dumps(value), compact):
        if text == start + inner + end and inner.endswith(written):
            return inner.removesuffix(written), written
    return None, ""
