"""An answer read while it comes: what the model says to itself, what it says, its calls."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from medusa_kit.base.tokenizer.turn_end import special_ids
from medusa_kit.data.template import chat_template
from medusa_kit.serve.calls.tool_calls import CALL, END, CallReader, Piece, held_back

# Tags around what models say to themselves.
REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
             ("<|START_THINKING|>", "<|END_THINKING|>"))  # fmt: skip


class Reasoning(NamedTuple):
    """The tags of a model that has such. `opened`: the prompt ends behind the first of them;
    `closed`: behind the second."""

    opening: str
    closing: str
    opened: bool = False
    closed: bool = False


def reasoning_of(tokenizer: Any, prompt: str) -> Reasoning | None:
    """The reasoning tags that the template or the added tokens name; None: no tags. `prompt`: its
    text."""
    known = chat_template(tokenizer) or ""
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    for opening, closing in REASONING:
        if closing in known or {opening, closing} <= added:
            end = prompt.rstrip()
            return Reasoning(opening, closing, end.endswith(opening), end.endswith(closing))
    return None


class Reading(NamedTuple):
    """What an answer is read for."""

    calls: bool = False
    reasoning: Reasoning | None = None

    @property
    def tags(self) -> list[str]:
        """The tags that are read in the text, special tokens or not."""
        return [*((CALL, END) if self.calls else ()), *(self.reasoning or ())[:2]]

    def aloud(self, text: str) -> str:
        """An answer's text behind the reasoning, with the tags of its calls."""
        if self.reasoning is None:
            return text
        return text.partition(self.reasoning.closing)[2].lstrip() or text

    def dropped(self, tokenizer: Any) -> frozenset[int]:
        """Special tokens that are no tags, so no part of the text that is read."""
        return frozenset(special_ids(tokenizer) - self._ids(tokenizer))

    def keeps_special(self, tokenizer: Any) -> bool:
        """Whether a tag is a special token, which the answer's text lacks."""
        return bool(self.tags) and not self._ids(tokenizer).isdisjoint(special_ids(tokenizer))

    def _ids(self, tokenizer: Any) -> set[int]:
        """The ids of tags that are tokens."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        return {number for number, token in added.items() if token.content in self.tags}


NO_READING = Reading()


@dataclass
class AnswerReader:
    """`push` text as it comes, `finish` at its end."""

    reading: Reading
    calls: CallReader = field(default_factory=CallReader)
    _text: str = ""  # not passed on yet
    _inside: bool | None = None  # of the reasoning; None: not known yet
    _begun: bool = False  # whether something of the current part has been passed on
    _past: bool = False  # the reasoning

    def __post_init__(self) -> None:
        reasoning = self.reading.reasoning
        self._inside = False if reasoning is None else (True if reasoning.opened else None)

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return list(self._pieces())

    def finish(self) -> list[Piece]:
        remaining, self._text = self._text, ""
        if self._inside:
            return [Piece(reasoning=reasoning)] if (reasoning := remaining.rstrip()) else []
        return [*self._spoken(remaining), *(self.calls.finish() if self.reading.calls else [])]

    def finish_reason(self, reason: str) -> str:
        """The finish reason for clients. `reason`: how the answer ended."""
        return self.calls.finish_reason(reason) if self.reading.calls else reason

    def _pieces(self) -> Iterator[Piece]:
        if self._inside is None:
            self._begin()
        if self._inside:
            yield from self._reasoned()
        if self._inside is False:
            text, self._text = self._text, ""
            yield from self._spoken(text)

    def _begin(self) -> None:
        """Note whether the answer begins with reasoning, once that is known."""
        assert self.reading.reasoning is not None
        opening, start = self.reading.reasoning.opening, self._text.lstrip()
        if start.startswith(opening):
            self._text, self._inside = start.removeprefix(opening), True
        elif not opening.startswith(start):
            self._inside = False

    def _reasoned(self) -> Iterator[Piece]:
        assert self.reading.reasoning is not None
        closing = self.reading.reasoning.closing
        text, tag, after = self._text.partition(closing)
        if not self._begun:
            text = text.lstrip()
        # What the tag may begin with waits, and white space, which does not count before it.
        reasoning = text.rstrip() if tag else text[: len(text) - held_back(text, closing)]
        self._text = after if tag else text[len(reasoning) :]
        self._begun = self._begun or bool(reasoning)
        if reasoning:
            yield Piece(reasoning=reasoning)
        if tag:
            self._inside, self._begun, self._past = False, False, True

    def _spoken(self, text: str) -> list[Piece]:
        if self._past and not self._begun:
            text = text.lstrip()
        self._begun = self._begun or bool(text)
        if self.reading.calls:
            return self.calls.push(text)
        return [Piece(text)] if text else []
