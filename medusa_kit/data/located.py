"""Where the messages of a long row are in its text, by one rendering in which all of them say
something else: what stands between is the template's own."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from medusa_kit.data.rendered import Span
from medusa_kit.data.rows import Message

# Private characters, which neither templates nor rows have, at both ends of what is said instead:
# two texts then begin and cease to differ where the words do. The number is that of a part.
OTHER = "\ue000other{}\ue001"
ESCAPED = re.compile(r"(?:\ue000|\\ue000)other(\d+)(?:\ue001|\\ue001)")
BARE = re.compile(OTHER.format(r"(\d+)"))
# How templates write the arguments of calls.
STYLES: tuple[Mapping[str, Any], ...] = (
    {}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4},
)  # fmt: skip


class Part(NamedTuple):
    """What a message says, in one of its keys or calls. `words`: a text, or arguments of a call."""

    message: int
    key: str
    words: Any


def other_arguments(arguments: Any, said: str) -> Any:
    """Other arguments of a call, in the same form."""
    other = {said: said}
    return json.dumps(other, ensure_ascii=False) if isinstance(arguments, str) else other


def with_others(
    messages: Sequence[Message], keys: Mapping[int, Iterable[str]]
) -> tuple[list[Message], list[Part]]:
    """(messages that say something else in these keys of them, what they said, by number)."""
    changed, parts = list(messages), list[Part]()
    for index, of_message in keys.items():
        other = dict(messages[index])
        for key in of_message:
            if key != "tool_calls":
                parts.append(Part(index, key, messages[index].get(key)))
                other[key] = OTHER.format(len(parts) - 1)
                continue
            other[key] = []
            for call in messages[index][key]:
                function = call["function"]
                parts.append(Part(index, key, function["arguments"]))
                said = OTHER.format(len(parts) - 1)
                function = {**function, "arguments": other_arguments(function["arguments"], said)}
                other[key].append({**call, "function": function})
        changed[index] = other
    return changed, parts


def shown_parts(other: str) -> set[int]:
    """The numbers of the parts that a text of other words shows."""
    return set(map(int, ESCAPED.findall(other)))


def spans_of(text: str, other: str, parts: Sequence[Part]) -> dict[int, Span]:
    """The characters of each message of which a part is shown: those that differ where it alone
    says something else. `other`: the text with other words. Empty where the text is not made of
    what the messages say and of what stands between."""
    pieces = _pieces(other, parts)
    if {number for number, *_ in pieces} < _needed(parts) or not _once(pieces):
        return {}
    spans, at, read = dict[int, Span](), 0, 0
    for place, (number, start, end, style) in enumerate(pieces):
        before = other[read:start]
        following = pieces[place + 1][1] if place + 1 < len(pieces) else len(other)
        if not text.startswith(before, at):
            return {}
        at, read = at + len(before), end
        fitting = [words for words in _as_written(parts[number], style)
                   if text.startswith(words + other[end:following], at)]  # fmt: skip
        if len(fitting) != 1:
            return {}
        first, last = _differing(fitting[0], other[start:end])
        index = parts[number].message
        whole = spans.get(index, (at + first, 0))[0]
        spans[index] = (whole, at + last)
        at += len(fitting[0])
    return spans if text[at:] == other[read:] else {}


def _pieces(other: str, parts: Sequence[Part]) -> list[tuple[int, int, int, Mapping[str, Any]]]:
    """(number, start, end, style) of each part in a text of other words."""
    found, read = [], 0
    for match in BARE.finditer(other):
        number, (start, end), style = int(match[1]), match.span(), STYLES[0]
        if start < read:  # the value beside its key
            continue
        if number < len(parts) and parts[number].key == "tool_calls":
            for style in STYLES:
                written = _json({match[0]: match[0]}, style)
                start = match.start() - written.index(match[0])
                end = start + len(written)
                if other[start:end] == written:
                    break
            else:
                return []
        found.append((number, start, end, style))
        read = end
    return found


def _needed(parts: Sequence[Part]) -> set[int]:
    """Templates leave out earlier thoughts, and nothing else."""
    return {number for number, part in enumerate(parts) if part.key != "reasoning_content"}


def _once(pieces: Sequence[tuple[int, int, int, Mapping[str, Any]]]) -> bool:
    return len({number for number, *_ in pieces}) == len(pieces)


def _as_written(part: Part, style: Mapping[str, Any]) -> set[str]:
    """How a template may write what is said."""
    if part.key != "tool_calls" or isinstance(part.words, str):
        said = str(part.words or "")
        return {said} if part.key == "tool_calls" else {said, said.strip(), said.lstrip(),
                                                        said.rstrip()}  # fmt: skip
    return {_json(part.words, style), _json(part.words, {**style, "sort_keys": True})}


def _json(value: Any, style: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, **style)


def _differing(words: str, other: str) -> Span:
    """The characters of some words that differ from others in their place."""
    start = common_start(words, other)
    return start, len(words) - common_start(words[start:][::-1], other[start:][::-1])


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
