"""The form of a call that has one entry for each argument, in place of a JSON object."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from medusa_kit.base.tokenizer.thought_marks import MARK, num_common

# What a value may be. Integers are numbers.
TEXT = "string"
TYPES = (TEXT, "number", "boolean", "null", "object", "array")


class Value(NamedTuple):
    """What an argument may be: text, which stands as it is, and JSON of the types `others`."""

    text: bool
    others: tuple[str, ...] = ()


ANYTHING = Value(True, TYPES[1:])
WORDS = ("true", "false", "null")  # of JSON


class ArgumentForm(NamedTuple):
    """`opening`: before an argument's name; `heads`: between name and value, for each of TYPES;
    `closing`: behind the value. `words`: what the template writes for true, false and null."""

    opening: str
    heads: tuple[str, ...]
    closing: str
    words: tuple[str, ...] = WORDS

    @property
    def key_end(self) -> str:
        """What ends an argument's name, whatever the type of the value."""
        ends = {head[: num_common(head, self.heads[0])] for head in self.heads}
        return min(ends, key=len)

    @property
    def mark(self) -> str:
        """What ends a text; it cannot be part of one."""
        match = re.search(MARK, self.closing)
        return match[0] if match else ""

    @property
    def before_mark(self) -> str:
        """The white space between a value and the mark, no part of the value."""
        return self.closing.partition(self.mark)[0]

    @property
    def parts(self) -> tuple[str, ...]:
        """The texts that may have marks."""
        return (self.opening, *dict.fromkeys(self.heads), self.closing)

    def head(self, kind: str) -> str:
        return self.heads[TYPES.index(kind)]

    @property
    def typed(self) -> bool:
        """Whether the text before a value tells text from JSON."""
        return self.heads[0] not in self.heads[1:]

    def heads_of(self, kinds: Iterable[str]) -> tuple[str, ...]:
        """What may stand before JSON of these types; where there are none, before any JSON."""
        heads = self.heads[1:] if self.typed else self.heads
        return tuple(dict.fromkeys([self.head(kind) for kind in kinds] or heads))

    def words_of(self, kinds: Collection[str]) -> tuple[str, ...]:
        """The template's own words for values of these types, where they are not JSON's."""
        types = zip(self.words, WORDS, ("boolean", "boolean", "null"), strict=True)
        return tuple(own for own, word, kind in types if own != word and kind in kinds)

    def as_json(self, text: str) -> str:
        """JSON for a word of the template's own; other text as it is."""
        return dict(zip(self.words, WORDS, strict=True)).get(text, text)

    def written(self, arguments: Mapping[str, Any]) -> str:
        """Arguments as the model writes them: text as it is, all else as JSON."""
        return "".join(
            self.opening
            + name
            + self.head(type_of(value))
            + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            + self.closing
            for name, value in arguments.items()
        )


def type_of(value: Any) -> str:
    """The name that JSON Schema has for a value's type."""
    names = {str: TEXT, bool: "boolean", int: "number", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")
