"""The calls in an answer, read while it comes. The grammar (call_grammar.py) sees to it that what
follows a tag is a call; where the token that ends the tag says otherwise, the tag is text."""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

CALL, END = "<tool_call>", "</tool_call>"
OPENING, CLOSING = '{"name":"', '","arguments":{'  # around a name, without white space
HEAD = re.compile(r'\s*{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?={)')


@dataclass(frozen=True)
class Piece:
    """Text of the answer, or of what the model said to itself, or a part of its call number
    `index`: `id` and `name` come first, then pieces of `arguments`."""

    content: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    reasoning: str = ""

    def as_delta(self) -> dict[str, Any]:
        """The piece in the form of a streamed chunk's `delta`."""
        if self.index is None:
            return {"content": self.content}
        call: dict[str, Any] = {"index": self.index, "function": {"arguments": self.arguments}}
        if self.id is not None:
            call |= {"id": self.id, "type": "function"}
            call["function"]["name"] = self.name
        return {"tool_calls": [call]}


def delta_of(pieces: Sequence[Piece]) -> dict[str, Any]:
    """What several pieces add, as one chunk's `delta`."""
    delta: dict[str, Any] = {}
    if reasoning := "".join(piece.reasoning for piece in pieces):
        delta["reasoning_content"] = reasoning
    if content := "".join(piece.content for piece in pieces):
        delta["content"] = content
    calls: dict[int, Any] = {}
    for piece in pieces:
        if piece.index is None:
            continue
        (call,) = piece.as_delta()["tool_calls"]
        if piece.index in calls:
            calls[piece.index]["function"]["arguments"] += piece.arguments
        else:
            calls[piece.index] = call
    return delta | ({"tool_calls": list(calls.values())} if calls else {})


@dataclass
class CallReader:
    """`push` text as it comes, `finish` at its end."""

    num_calls: int = 0
    complete: int = 0  # calls whose arguments have been read to their end
    _text: str = ""  # not passed on yet
    _space: str = ""  # before the newest tag
    _in_call: bool = False
    _depth: int = 0  # of the arguments' braces; 0: they have not begun
    _in_string: bool = False
    _escaped: bool = False

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while True:
            before = self._text, self._in_call
            piece = self._next()
            if piece is not None:
                pieces.append(piece)
            if (self._text, self._in_call) == before:
                return pieces

    def finish(self) -> list[Piece]:
        """The text that was held back, since a tag might have followed."""
        remaining, self._text = self._text, ""
        return [] if self._in_call or self.num_calls or not remaining else [Piece(remaining)]

    def finish_reason(self, reason: str) -> str:
        """The finish reason for clients. `reason`: how the answer ended."""
        return "tool_calls" if reason == "stop" and self.complete else reason

    def _next(self) -> Piece | None:
        if self._depth:
            return self._arguments()
        if self._in_call:
            return self._head()
        text, tag, after = self._text.partition(CALL)
        if tag:
            self._text, self._in_call = after, True
            self._space = text[len(text.rstrip()) :]
            text = text.rstrip()
        else:
            end = len(text) - held_back(text, CALL)
            text, self._text = text[:end], text[end:]
        return Piece(text) if text and not self.num_calls else None

    def _head(self) -> Piece | None:
        if (match := HEAD.match(self._text)) is None:
            if _may_begin(self._text):
                return None
            self._in_call = False
            return None if self.num_calls else Piece(self._space + CALL)
        self._text = self._text[match.end() + 1 :]
        self._depth, self.num_calls = 1, self.num_calls + 1
        name = json.loads(match[1])
        return Piece("", self.num_calls - 1, f"call_{secrets.token_hex(12)}", name, "{")

    def _arguments(self) -> Piece | None:
        ends = (end for end, char in enumerate(self._text, start=1) if self._closes(char))
        end = next(ends, len(self._text))
        if not self._depth:
            self._in_call, self.complete = False, self.complete + 1
        text, self._text = self._text[:end], self._text[end:]
        return Piece("", self.num_calls - 1, arguments=text) if text else None

    def _closes(self, character: str) -> bool:
        """Whether the arguments end with this character."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped, self._in_string = character == "\\", character != '"'
        else:
            self._in_string = character == '"'
            self._depth += {"{": 1, "}": -1}.get(character, 0)
        return not self._depth


@dataclass
class ReadAnswer:
    """A finished answer as OpenAI's API has it; calls that were cut have cut arguments."""

    content: str | None
    finish_reason: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""


class Reader(Protocol):
    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...

    def finish_reason(self, reason: str) -> str: ...


def read_answer(text: str, finish_reason: str, reader: Reader | None = None) -> ReadAnswer:
    """Read a finished answer, by a `CallReader` unless `reader` is given."""
    reader = CallReader() if reader is None else reader
    pieces = [*reader.push(text), *reader.finish()]
    content = "".join(piece.content for piece in pieces)
    reasoning = "".join(piece.reasoning for piece in pieces)
    return ReadAnswer(
        content or None, reader.finish_reason(finish_reason), _calls(pieces), reasoning
    )


def _calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.id is not None:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": piece.id, "type": "function", "function": function})
        elif piece.index is not None:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


def _may_begin(text: str) -> bool:
    """Whether this can become the beginning of a call."""
    compact = "".join(text.split())
    if len(compact) <= len(OPENING):
        return OPENING.startswith(compact)
    name, quote, after = compact.removeprefix(OPENING).partition('"')
    return compact.startswith(OPENING) and "\\" not in name and CLOSING.startswith(quote + after)


def held_back(text: str, tag: str) -> int:
    """How many of the last characters may belong to what precedes a tag, or to the tag."""
    longest = min(len(text), len(tag) - 1)
    begun = next((n for n in range(longest, 0, -1) if tag.startswith(text[-n:])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
