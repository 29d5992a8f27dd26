"""Answers of models that write thoughts, answer and calls as messages of their own (channels), read
while they come."""

import json
import re
import secrets
from dataclasses import dataclass

from medusa_kit.serve.calls.reasoning import Channels
from medusa_kit.serve.calls.tool_calls import Piece, held_back

RECIPIENT = re.compile(r"\bto=([^\s<]+)")
LONGEST_HEAD = 200  # characters; what goes on longer without its end is no head


@dataclass
class ChannelReader:
    """`push` text as it comes, `finish` at its end. A message to a function is a call where such
    are read (`calls`); those to anybody else are thoughts, as it works on them."""

    channels: Channels
    calls: bool = False
    num_calls: int = 0
    complete: int = 0  # calls whose arguments have been read to their end
    _text: str = ""  # not passed on yet
    _kind: str | None = None  # of the message under way; None: its head is
    _arguments: str = ""  # of the call under way
    _begun: tuple[str, ...] = ()  # kinds that have said something
    _fresh: bool = False  # whether the message under way has said nothing yet

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while True:
            before = self._text, self._kind
            if self._kind is None:
                pieces += self._head()
            else:
                pieces += self._body()
            if (self._text, self._kind) == before:
                return pieces

    def finish(self) -> list[Piece]:
        """What was held back. A head that was cut says nothing."""
        remaining, self._text = self._text, ""
        pieces = [] if self._kind is None else self._said(remaining)
        self._close()
        return pieces

    def finish_reason(self, reason: str) -> str:
        """The finish reason for clients. `reason`: how the answer ended."""
        return "tool_calls" if reason == "stop" and self.complete else reason

    def _head(self) -> list[Piece]:
        head, end, rest = self._text.partition(self.channels.head_end)
        if not self._may_be_head(head):
            self._kind, self._fresh = "content", True
        elif end:
            self._text = rest
            return self._begin(head)
        return []

    def _may_be_head(self, text: str) -> bool:
        start = text.lstrip()
        known = self.channels
        beginnings = (known.head, known.head_end, "to=", known.thoughts, known.aloud)
        begins = any(start.startswith(one) or one.startswith(start) for one in beginnings)
        return len(start) < LONGEST_HEAD and (bool(self._begun) or begins)

    def _begin(self, head: str) -> list[Piece]:
        match, self._fresh = RECIPIENT.search(head), True
        recipient = match[1] if match else ""
        functions = self.channels.recipient.removeprefix("to=")
        if self.calls and functions and recipient.startswith(functions):
            self._kind, self._arguments = "call", ""
            self.num_calls += 1
            name, number = recipient.removeprefix(functions), secrets.token_hex(12)
            return [Piece("", self.num_calls - 1, f"call_{number}", name)]
        is_said = self.channels.aloud in head or not recipient
        is_said = is_said and self.channels.thoughts not in head
        self._kind = "content" if is_said else "reasoning"
        return []

    def _body(self) -> list[Piece]:
        text, end, rest = self._text.partition(self.channels.end)
        if not end:
            # White space counts, so only what the end may begin with waits.
            waiting = held_back(text, self.channels.end)
            waiting = len(text[len(text) - waiting :].lstrip())
            text, rest = text[: len(text) - waiting], text[len(text) - waiting :]
        pieces, self._text = self._said(text), rest
        if end:
            self._close()
        return pieces

    def _said(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._kind == "call":
            self._arguments += text
            return [Piece("", self.num_calls - 1, arguments=text)]
        kind = self._kind or "content"
        if self._fresh and kind in self._begun:  # a further message of the kind
            text = f"\n{text}"
        self._fresh, self._begun = False, (*self._begun, kind)
        return [Piece(reasoning=text) if kind == "reasoning" else Piece(text)]

    def _close(self) -> None:
        if self._kind == "call":
            self.complete += _is_json(self._arguments)
        self._begun, self._kind = (*self._begun, ""), None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
