"""Arguments that are written one by one, read while they come, as the JSON of an object."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from medusa_kit.files import parse_json
from medusa_kit.serve.calls.argument_form import ANYTHING, TEXT, ArgumentForm, Value, type_of

SCALAR = re.compile(r"[^\s<>\[\]{},\"]*")
WORD = re.compile(r"[A-Za-z]+")


@dataclass
class JsonEnd:
    """Where a JSON value ends that comes in pieces."""

    depth: int = 0
    begun: bool = False
    in_string: bool = False
    escaped: bool = False

    def of(self, text: str) -> int | None:
        """How many of the next characters belong to the value; None: all, and more may."""
        for place, character in enumerate(text):
            inside = self.depth > 0 or self.in_string
            if self.begun and not inside and SCALAR.fullmatch(character) is None:
                return place
            self.begun = True
            self._take(character)
            if character in '"]}' and not self.depth and not self.in_string:
                return place + 1
        return None

    def _take(self, character: str) -> None:
        if self.escaped:
            self.escaped = False
        elif self.in_string:
            self.escaped, self.in_string = character == "\\", character != '"'
        else:
            self.in_string = character == '"'
            self.depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)


@dataclass
class ArgumentReader:
    """`push` text as it comes; what is returned adds up to the JSON. `values`: how arguments are
    written, by name. `rest`: the text behind the arguments, once they have ended."""

    form: ArgumentForm
    values: Mapping[str, Value] = field(default_factory=dict)
    rest: str | None = None
    _text: str = ""  # not passed on yet
    _state: str = "name"  # what comes next: name, text, json, either, closing
    _number: int = 0  # of arguments begun
    _lead: str = ""  # what may come before the value
    _json: JsonEnd = field(default_factory=JsonEnd)
    _types: tuple[str, ...] = ()  # that a value may have besides text

    def push(self, text: str) -> str:
        self._text += text
        written, steps = "", {"name": self._name, "text": self._as_text, "json": self._as_json,
                              "either": self._as_either, "closing": self._close}  # fmt: skip
        while self.rest is None:
            before = self._text, self._state
            written += steps[self._state]()
            if (self._text, self._state) == before:
                break
        return written

    def _name(self) -> str:
        opening, start = self.form.opening.strip(), self._text.lstrip()
        if opening.startswith(start):
            return ""
        if not start.startswith(opening):
            return self._ended()
        name, end, rest = start.removeprefix(opening).partition(self.form.key_end)
        head = next((one for one in self.form.heads if (end + rest).startswith(one.rstrip())), None)
        if not end or head is None:
            return ""
        self._text = (end + rest).removeprefix(head.rstrip())
        self._lead = head[len(head.rstrip()) :]
        self._number += 1
        value = self.values.get(name, self.values.get("", ANYTHING))
        self._state = self._way(value, head == self.form.head(TEXT))
        before = ", " if self._number > 1 else ""
        return f"{before}{_json(name)}: {_quote(self._state)}"

    def _way(self, value: Value, is_text: bool) -> str:
        """How a value is read. `is_text`: text may stand behind its head."""
        self._types, self._json = value.others, JsonEnd()
        if self.form.typed:
            return "text" if is_text else "json"
        return "json" if not value.text else "either" if value.others else "text"

    def _ended(self) -> str:
        self.rest = self._text
        return "}"

    def _led(self) -> bool:
        """Whether what comes before a text is there; it is no part of the text."""
        if self._lead and self._lead != self._text and self._lead.startswith(self._text):
            return False
        self._text, self._lead = self._text.removeprefix(self._lead), ""
        return True

    def _as_text(self) -> str:
        if not self._led():
            return ""
        text, mark, _ = self._text.partition(self.form.mark)
        if mark:
            self._text, self._state = self._text[len(text) :], "closing"
            return _json(text.removesuffix(self.form.before_mark))[1:-1] + '"'
        end = len(self._text) - self._held_back()
        text, self._text = self._text[:end], self._text[end:]
        return _json(text)[1:-1]

    def _held_back(self) -> int:
        """How many of the last characters may belong to what ends a text."""
        ends = self.form.before_mark + self.form.mark, self.form.mark
        sizes = range(min(len(self._text), len(ends[0])), 0, -1)
        return next((n for n in sizes for end in ends if end.startswith(self._text[-n:])), 0)

    def _as_json(self) -> str:
        if not self._json.begun:
            self._text = self._text.lstrip()
            if (word := WORD.match(self._text)) is not None:
                return self._word(word[0])
        end = self._json.of(self._text)
        if end is not None:
            self._state = "closing"
        written = self._text[:end]
        self._text = self._text[len(written) :]
        return written

    def _word(self, word: str) -> str:
        """Which word it is shows at its end."""
        if word == self._text:
            return ""
        self._text, self._state = self._text.removeprefix(word), "closing"
        return self.form.as_json(word)

    def _as_either(self) -> str:
        """Text, unless it is JSON of a type that the value may have."""
        if not self._led() or self.form.mark not in self._text:
            return ""
        text = self._text.partition(self.form.mark)[0]
        self._text, self._state = self._text[len(text) :], "closing"
        text = text.removesuffix(self.form.before_mark)
        return _either(self.form.as_json(text.strip()), text, self._types)

    def _close(self) -> str:
        closing, start = self.form.closing.strip(), self._text.lstrip()
        if start.startswith(closing):
            self._text, self._state = start.removeprefix(closing), "name"
        elif not closing.startswith(start):
            return self._ended()
        return ""


def _either(read: str, text: str, types: tuple[str, ...]) -> str:
    try:
        value = parse_json(read)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return _json(text)
    return written if type_of(value) in types else _json(text)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quote(state: str) -> str:
    return '"' if state == "text" else ""
