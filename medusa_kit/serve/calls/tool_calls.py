"""The calls in an answer, read while it comes. The grammar (call_grammar.py) sees to it that what
follows a tag is a call; where the token that ends the tag says otherwise, the tag is text."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from medusa_kit.serve.calls.argument_form import Value
from medusa_kit.serve.calls.argument_reader import ArgumentReader, JsonEnd
from medusa_kit.serve.calls.call_form import HERMES, NAME, CallForm, read_head


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

    form: CallForm = HERMES
    values: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)  # of each function
    num_calls: int = 0
    complete: int = 0  # calls whose arguments have been read to their end
    _text: str = ""  # not passed on yet
    _space: str = ""  # before the tag
    _expected: str | None = None  # before the next name; None: a tag is, and text
    _over: bool = False  # no call may come any more
    _object: JsonEnd | None = None  # of the arguments under way
    _entries: ArgumentReader | None = None  # of those, where they are written one by one

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while True:
            before = self._text, self._expected, self._entries
            piece = self._next()
            if piece is not None:
                pieces.append(piece)
            if (self._text, self._expected, self._entries) == before:
                return pieces

    def finish(self) -> list[Piece]:
        """The text that was held back, since a tag might have followed."""
        remaining, self._text = self._text, ""
        return [] if self._expected is not None or not remaining else self._said(remaining)

    def finish_reason(self, reason: str) -> str:
        """The finish reason for clients. `reason`: how the answer ended."""
        return "tool_calls" if reason == "stop" and self.complete else reason

    def _next(self) -> Piece | None:
        if self._object is not None:
            return self._arguments(self._object)
        if self._entries is not None:
            return self._one_by_one(self._entries)
        if self._expected is not None:
            return self._head(self._expected)
        form = self.form
        text, tag, after = self._text.partition(form.tag)
        if form.first:
            waits = not tag and form.tag.startswith(text.lstrip())
            self._over = self._over or bool(text.strip() if tag else not waits)
        if self._over:
            text, self._text = self._text, ""
        elif tag:
            self._text, self._expected = after, form.opening.removeprefix(form.tag)
            self._space = text[len(text.rstrip()) :]
            text = text.rstrip()
        else:
            end = 0 if form.first else len(text) - held_back(text, form.tag)
            text, self._text = text[:end], text[end:]
        return next(iter(self._said(text)), None)

    def _said(self, text: str) -> list[Piece]:
        """Text of the answer, of which there is none behind calls."""
        return [Piece(text)] if text and not self.num_calls else []

    def _head(self, expected: str) -> Piece | None:
        form = self.form
        follows = "{" if form.arguments is None else ""
        length, name = read_head(self._text, expected + NAME + form.middle, follows)
        if length < 0:
            return None
        if length == 0:
            self._expected, self._over = None, self.form.first or self.num_calls > 0
            return next(iter(self._said(self._space + self.form.tag)), None)
        self._text = self._text[length + len(follows) :]
        self.num_calls += 1
        if form.arguments is None:
            self._object = JsonEnd(depth=1, begun=True)
        else:
            self._entries = ArgumentReader(form.arguments, self.values.get(name, {}))
        return Piece("", self.num_calls - 1, self._new_id(), name, "{")

    def _new_id(self) -> str:
        taken = self.form.taken
        number = secrets.token_hex(12)
        return number[:9] if taken and taken.short_ids else f"call_{number}"

    def _arguments(self, reader: JsonEnd) -> Piece | None:
        end = reader.of(self._text)
        if end is not None:
            self._end_call()
        text = self._text[:end]
        self._text = self._text[len(text) :]
        return Piece("", self.num_calls - 1, arguments=text) if text else None

    def _one_by_one(self, reader: ArgumentReader) -> Piece | None:
        written, self._text = reader.push(self._text), ""
        if reader.rest is not None:
            self._end_call()
            self._text = reader.rest
        return Piece("", self.num_calls - 1, arguments=written) if written else None

    def _end_call(self) -> None:
        self._object, self._entries = None, None
        self._expected, self.complete = self.form.between, self.complete + 1
        self._over = self._expected is None


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


def held_back(text: str, tag: str) -> int:
    """How many of the last characters may belong to what precedes a tag, or to the tag."""
    longest = min(len(text), len(tag) - 1)
    begun = next((n for n in range(longest, 0, -1) if tag.startswith(text[-n:])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
