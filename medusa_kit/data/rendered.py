"""One row's conversations as the chat template renders them: text, its tokens, and their positions.

A tokenizer that tells no offsets, or encodes conversations in a way of its own, is read through its
token ids: each stands as one character of the "text" then.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from medusa_kit.data.rows import Message
from medusa_kit.data.template import (
    as_texts,
    chat_template,
    dated,
    encodes_text,
    refusals,
    render,
    render_text,
)

Span = tuple[int, int]  # characters of a text, the first and one past the last


class Rendered:
    """Renders conversations of a row with its tools."""

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.tokenizer = tokenizer
        self.tools = list(tools) if tools else None
        self.as_text = encodes_text(tokenizer) and bool(getattr(tokenizer, "is_fast", False))

    def text(self, messages: Sequence[Message], ask: bool = False) -> str:
        """The conversation as text. `ask`: with what the template writes before an answer. Raises
        DataError."""
        if self.as_text:
            return render_text(self.tokenizer, messages, self.tools, ask=ask)
        return "".join(map(chr, render(self.tokenizer, messages, ask, self.tools)))

    def tokens(self, text: str) -> tuple[list[int], list[Span]]:
        """(ids, the characters of each) of such a text."""
        if not self.as_text:
            return [ord(character) for character in text], [(i, i + 1) for i in range(len(text))]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [tuple(span) for span in encoded["offset_mapping"]]

    def is_blank(self, part: str) -> bool:
        """Whether a part of such a text is white space."""
        shown = (
            part if self.as_text else self.tokenizer.decode([ord(character) for character in part])
        )
        return not shown.strip()

    def marked(self, messages: Sequence[Message]) -> list[Span]:
        """The characters that the template's {% generation %} marks enclose."""
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation = [
            {k: v for k, v in message.items() if v is not None} for message in as_texts(messages)
        ]
        with refusals():
            _, spans = render_jinja_template(
                conversations=[conversation], tools=self.tools, return_assistant_tokens_mask=True,
                chat_template=dated(chat_template(self.tokenizer)),
                **self.tokenizer.special_tokens_map,
            )  # fmt: skip
        return [(start, end) for start, end in spans[0]]
