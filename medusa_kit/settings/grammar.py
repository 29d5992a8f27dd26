"""What an answer must look like: a JSON schema, a regular expression, a Lark grammar, or choices.

Only the text is kept here; infer/decode/accept/grammar.py makes masks of it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from medusa_kit.errors import ConfigError, half_pair
from medusa_kit.files import GivenTwiceError, parse_written_json
from medusa_kit.shown import shown

JSON_OBJECT = {"type": "object"}
KEEP_ONE = "keep one of them"


class Free(NamedTuple):
    """Anything at all may come before `tag`, special tokens and broken characters too; where `tag`
    counts as the `first` of an answer's words alone, white space. What comes behind it is the
    grammar's rule `behind`.

    `reasoning`: the tags around what the model says to itself, where `tag` is only text; it is the
    first thing of an answer, and `opened` where the prompt ends inside of it.
    """

    tag: str
    reasoning: tuple[str, str] | None = None
    opened: bool = False
    first: bool = False


class Grammar(NamedTuple):
    """Made by one of the class methods. Raises ConfigError for what is not of the right type; what
    the text says is checked where it is used."""

    kind: str  # json_schema | regex | lark
    text: str
    # That a Lark grammar's lines `tag_0: …`, `tag_1: …` are for (and `until_0[lazy]: …`, any text
    # up to its end): where the tokenizer has one of them as a special token, that token is meant.
    tags: tuple[str, ...] = ()
    free: Free | None = None
    exact: bool = False  # what answers could not follow of JSON schemas has been looked for

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """JSON that fits a schema: a mapping, or its text."""
        if isinstance(schema, str):
            try:
                schema = parse_written_json(schema)
            except GivenTwiceError as error:
                raise ConfigError(f"the JSON schema: {error}", hint=KEEP_ONE) from None
            except ValueError as error:
                raise ConfigError(f"the JSON schema is not JSON: {error}") from None
        if not isinstance(schema, Mapping):
            raise ConfigError(
                f"the JSON schema is of type {type(schema).__name__}; expected an object",
                hint='the schema of any object is {"type": "object"}',
            )
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
            return cls("json_schema", _text("JSON schema", text))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the JSON schema cannot be written as JSON: {error}") from None

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that a regular expression matches as a whole, in the syntax of Rust's `regex`."""
        return cls("regex", _text("regular expression", pattern))

    @classmethod
    def lark(cls, rules: str) -> "Grammar":
        """Text that llguidance's variant of a Lark grammar derives from its rule `start`."""
        return cls("lark", _text("grammar", rules))

    @classmethod
    def choices(cls, options: Sequence[str]) -> "Grammar":
        """One of these texts."""
        several = isinstance(options, Iterable) and not isinstance(options, str | bytes | Mapping)
        texts = [_text("choice", option) for option in options] if several else []
        if not texts:
            raise ConfigError(
                f"choices {shown(options)}: expected a list of texts, at least one",
                hint='for instance ["yes", "no"]',
            )
        return cls.lark("start: " + " | ".join(quoted(text) for text in texts))


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(kind: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{kind} {shown(value)} is of type {type(value).__name__}; expected a text, not an "
            "empty one"
        )
    if half_pair(value):
        raise ConfigError(f"the {kind} has half of a surrogate pair, which no text can have")
    return value
