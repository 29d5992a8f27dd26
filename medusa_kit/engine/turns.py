"""A conversation's next prompt as token ids, of which only what is new is encoded.

Chat templates make text, and an answer's text may be encoded to other tokens than the model wrote.
So the ids of earlier turns are kept for as long as the text of the whole conversation begins with
theirs; from the first place on where a template changes an earlier turn (drops its thoughts, say),
or a person does, text is encoded again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_kit.data.readers import Message
from medusa_kit.data.template import (
    NOTHING,
    chat_template,
    encode_after,
    encode_text,
    render_text,
)
from medusa_kit.infer.decode.detokenize import text_of


@dataclass(frozen=True)
class Mark:
    """A position between two ids: those before it stand for so many characters, which say no more
    than so many messages."""

    num_messages: int
    num_chars: int
    num_ids: int


@dataclass(frozen=True)
class Prompt:
    """A conversation up to a question. `text`: by the chat template; the last mark is at its end.

    Without marks nothing is known of which ids stand for what of the text.
    """

    messages: list[Message]
    ids: list[int]
    text: str = ""
    marks: list[Mark] = field(default_factory=list)
    rewritten: bool = False  # the template changed earlier turns, which were encoded again


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer: the message, and the model's own tokens without the stop token.
    `tagged`: special tokens may be part of its text, and what the model said to itself be missing.
    """

    prompt: Prompt
    message: Message
    ids: list[int]
    tagged: bool = False

    @property
    def all_ids(self) -> list[int]:
        return [*self.prompt.ids, *self.ids]


def next_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    before: Answered | None,
    encode: Callable[[list[Message]], list[int]] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = NOTHING,
    check: Callable[[str], None] | None = None,
) -> Prompt:
    """The prompt that these messages are. `before`: the turn before; `encode`: encodes everything,
    None where that is encoding the template's text; `tools`, `variables`: for the template.
    `check`: called with that text before it is encoded.

    Raises DataError where the chat template refuses them, and what `check` does.
    """
    messages = [dict(message) for message in messages]
    if encode is not None and (tokenizer is None or chat_template(tokenizer) is None):
        return Prompt(messages, encode(messages))
    text, rewritten = render_text(tokenizer, messages, tools, variables), False
    if check is not None:
        check(text)
    if before is not None:
        known = [*before.prompt.messages, before.message]
        num_same = _num_same(messages, known)
        marks = _marks_in(tokenizer, before, text, num_same)
        remaining = encode_after(tokenizer, text[marks[-1].num_chars :]) if marks else None
        rewritten = num_same == len(known) and (
            remaining is None or marks[-1].num_messages < num_same
        )
        if remaining is not None:
            ids = [*before.all_ids[: marks[-1].num_ids], *remaining]
            marks.append(Mark(len(messages), len(text), len(ids)))
            return Prompt(messages, ids, text, marks, rewritten)
    ids = encode_text(tokenizer, text) if encode is None else encode(messages)
    # A tokenizer may encode messages in another way than their text: then there is no mark.
    same = encode is None or encode_text(tokenizer, text) == ids
    marks = [Mark(len(messages), len(text), len(ids))] if same else []
    return Prompt(messages, ids, text, marks, rewritten)


def without_reasoning(message: Message) -> Message:
    """A message without what the model said to itself, which clients may send back or not."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _num_same(first: Sequence[Message], second: Sequence[Message]) -> int:
    """The number of messages that both begin with."""
    pairs = zip(map(without_reasoning, first), map(without_reasoning, second), strict=False)
    shorter = min(len(first), len(second))
    return next(
        (n for n, (message, counterpart) in enumerate(pairs) if message != counterpart), shorter
    )


def _marks_in(tokenizer: Any, before: Answered, text: str, num_same: int) -> list[Mark]:
    """The marks of the turn before up to which a text says the same by the same messages."""
    prompt = before.prompt
    marks = [
        mark
        for mark in prompt.marks
        if mark.num_messages <= num_same and text.startswith(prompt.text[: mark.num_chars])
    ]
    if num_same <= len(prompt.messages) or not marks or marks[-1] != prompt.marks[-1]:
        return marks
    matched = _matched_length(tokenizer, before, text[len(prompt.text) :])
    if matched is not None:
        chars, ids = matched
        marks.append(Mark(num_same, len(prompt.text) + chars, len(prompt.ids) + ids))
    return marks


def _matched_length(tokenizer: Any, before: Answered, follows: str) -> tuple[int, int] | None:
    """(characters, ids) of an answer that `follows`, what comes after its prompt, begins with.

    Less than the whole answer where its message was cut at a stop string, or where a template
    strips its end. None where the template says something else.
    """
    content, ids = before.message["content"], before.ids
    whole = own = text_of(tokenizer, ids, before.tagged)
    # SentencePiece prints no space before the first word of a text. Behind a prompt there is one,
    # which templates and clients may drop, or templates write themselves.
    printed = text_of(tokenizer, ids, before.tagged, before.prompt.ids)
    space = printed.removesuffix(own) if printed.endswith(own) else ""
    space = space if space.isspace() else ""
    bare = content.removeprefix(space)
    contents = [*([whole] if before.tagged else ()), bare, bare.rstrip()]
    for start in (2 * space, space, ""):
        for written in contents:
            if follows.startswith(start + written):
                count = len(ids)
                while not written.startswith(own):
                    count -= 1
                    own = text_of(tokenizer, ids[:count], before.tagged)
                return (len(start) + len(own), count) if own else (0, 0)
    return None
