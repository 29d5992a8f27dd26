"""The form in which a model writes calls: what stands around their names and arguments."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from medusa_kit.base.tokenizer.thought_marks import MARK
from medusa_kit.files import parse_json
from medusa_kit.serve.calls.argument_form import ArgumentForm
from medusa_kit.serve.calls.reasoning import Channels

# What stands for a call's name, for its id and its number in the texts of a form.
NAME, ID, NUMBER = "\ue000", "\ue001", "\ue002"
FIELDS = {NAME: "[a-zA-Z0-9_-]{1,64}", ID: "[a-zA-Z0-9_.:-]{1,64}", NUMBER: "[0-9]{1,3}"}
FIELD = re.compile(f"([{''.join(FIELDS)}])")
SPACE = re.compile(r"\s*")
# A mark, or whatever precedes the JSON.
TAG = re.compile(rf"{MARK}|[^\"{{\[{''.join(FIELDS)}]+")


class Taken(NamedTuple):
    """How a template takes calls. `as_text`: arguments as JSON, else as an object; `short_ids`: ids
    of nine characters alone. `tools`: whether it shows what tools there are."""

    as_text: bool = False
    short_ids: bool = False
    tools: bool = True


class CallForm(NamedTuple):
    """`opening`: before the first name; `middle`: between name and arguments, which are a JSON
    object, or one by one in the form `arguments`; `between`: from there to the next call's name,
    None where an answer has one call; `closing`: behind the last call. `taken`: None: the template
    shows no calls. `channels`: calls are messages of their own instead."""

    opening: str
    middle: str
    between: str | None
    closing: str
    taken: Taken | None = None
    channels: Channels | None = None
    arguments: ArgumentForm | None = None

    @property
    def tag(self) -> str:
        """What tells calls from other text."""
        match = TAG.match(self.opening)
        return match[0] if match else FIELD.split(self.opening)[0]

    @property
    def is_of_one(self) -> bool:
        """Whether a message has one call."""
        return self.between is None or self.channels is not None

    @property
    def first(self) -> bool:
        """Whether calls are JSON without a tag, so that nothing else may come before them."""
        return TAG.match(self.opening) is None

    @property
    def marks(self) -> tuple[str, ...]:
        """The tag, then all other marks."""
        parts = self.arguments.parts if self.arguments else ()
        texts = (self.opening, self.middle, *parts, self.between or "", self.closing)
        return tuple(
            dict.fromkeys([self.tag, *(m for text in texts for m in re.findall(MARK, text))])
        )

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and the JSON of its arguments, as the model writes them."""
        again = f"{self.closing}\n{self.opening}" if self.between is None else self.between
        texts = [
            (again if number else self.opening).replace(NUMBER, str(number)) + name
            + self.middle.replace(NUMBER, str(number)) + self._arguments(arguments)
            for number, (name, arguments) in enumerate(calls)
        ]  # fmt: skip
        return ("".join(texts) + self.closing).replace(ID, "0" * 9)

    def _arguments(self, arguments: str) -> str:
        """Arguments as the model writes them; what is no JSON object stands as it is."""
        if self.arguments is not None:
            with suppress(ValueError):
                if isinstance(read := parse_json(arguments), dict):
                    return self.arguments.written(read)
        return arguments


# As Hermes and Qwen write calls, and what models without a form of their own are told to write.
HERMES = CallForm(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    '}\n</tool_call>\n<tool_call>\n{"name": "',
    "}\n</tool_call>",
)


def read_head(text: str, expected: str, follows: str = "{") -> tuple[int, str]:
    """How long the beginning of a call up to its arguments is, and the name in it. The length is 0
    where the text does not begin so, -1 where it may when more comes. White space is free.
    `follows`: what the arguments begin with."""
    at, name = 0, ""
    for part in [*FIELD.split(expected), follows]:
        pattern = FIELDS.get(part)
        for character in [part] if pattern else "".join(part.split()):
            at = _past_space(text, at)
            match = re.compile(pattern or re.escape(character)).match(text, at)
            if at == len(text) or (pattern and match and match.end() == len(text)):
                return -1, ""
            if match is None:
                return 0, ""
            name, at = match[0] if part == NAME else name, match.end()
    return at - len(follows), name


def _past_space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return at if match is None else match.end()
