"""An answer read while it comes: what the model says to itself, what it says, its calls."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from medusa_kit.base.tokenizer.turn_end import special_ids
from medusa_kit.serve.calls.argument_form import Value
from medusa_kit.serve.calls.call_form import HERMES, CallForm
from medusa_kit.serve.calls.channels import ChannelReader
from medusa_kit.serve.calls.reasoning import Reasoning
from medusa_kit.serve.calls.tool_calls import CallReader, Piece, held_back


class Reading(NamedTuple):
    """What an answer is read for. `values`: how arguments are written, by function and name."""

    calls: bool = False
    reasoning: Reasoning | None = None
    form: CallForm = HERMES
    values: Mapping[str, Mapping[str, Value]] = MappingProxyType({})

    @property
    def tags(self) -> list[str]:
        """What is read in the text, special tokens or not."""
        marks = [] if self.reasoning is None else self.reasoning.marks
        return [*(self.form.marks if self.calls else ()), *marks]

    def aloud(self, text: str) -> str:
        """An answer's text behind the reasoning, with the tags of its calls."""
        if self.reasoning is None:
            return text
        behind = text.partition(self.reasoning.closing)[2].lstrip()
        return behind.removeprefix(self.reasoning.aloud) or text

    def dropped(self, tokenizer: Any) -> frozenset[int]:
        """Special tokens that are no tags, so no part of the text that is read."""
        return frozenset(special_ids(tokenizer) - self._ids(tokenizer))

    def keeps_special(self, tokenizer: Any) -> bool:
        """Whether a tag is a special token, which the answer's text lacks."""
        return bool(self.tags) and not self._ids(tokenizer).isdisjoint(special_ids(tokenizer))

    def _ids(self, tokenizer: Any) -> set[int]:
        """The ids of tags that are tokens."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        tags = self.tags
        return {number for number, token in added.items() if any(token.content in t for t in tags)}


NO_READING = Reading()


def reader_of(reading: Reading) -> "AnswerReader | ChannelReader":
    channels = None if reading.reasoning is None else reading.reasoning.channels
    return AnswerReader(reading) if channels is None else ChannelReader(channels, reading.calls)


@dataclass
class AnswerReader:
    """`push` text as it comes, `finish` at its end."""

    reading: Reading
    calls: CallReader = field(init=False)
    _text: str = ""  # not passed on yet
    _inside: bool | None = None  # of the reasoning; None: not known yet
    _begun: bool = False  # whether something of the current part has been passed on
    _past: bool = False  # the reasoning
    _over: str = ""  # what ended the words of the answer
    _aloud: str = ""  # what may still come before the words of the answer

    def __post_init__(self) -> None:
        self.calls = CallReader(self.reading.form, self.reading.values)
        reasoning = self.reading.reasoning
        self._inside = False if reasoning is None else (True if reasoning.opened else None)
        if reasoning is not None:
            self._aloud = reasoning.aloud

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return list(self._pieces())

    def finish(self) -> list[Piece]:
        remaining, self._text = self._text, ""
        if self._inside:
            return [Piece(reasoning=reasoning)] if (reasoning := remaining.rstrip()) else []
        if self._past and self._aloud and self._aloud.startswith(remaining.lstrip()):
            remaining = ""  # it was cut
        return [*self._spoken(remaining), *(self.calls.finish() if self.reading.calls else [])]

    def finish_reason(self, reason: str) -> str:
        """The finish reason for clients. `reason`: how the answer ended."""
        return self.calls.finish_reason(reason) if self.reading.calls else reason

    def _pieces(self) -> Iterator[Piece]:
        before = None
        while self._inside is not False and before != self._text:
            before = self._text
            if self._inside is None:
                self._begin()
            if self._inside:
                yield from self._reasoned()
        if self._inside is False and not self._awaits_words():
            yield from self._spoken(self._before_ending())

    def _begin(self) -> None:
        """Note whether the answer, or what follows reasoning, begins with reasoning, once that is
        known. Some models only close it."""
        assert self.reading.reasoning is not None
        opening, closing = self.reading.reasoning[:2]
        start = self._text.lstrip()
        if opening and start.startswith(opening):
            self._text, self._inside = start.removeprefix(opening), True
        elif start.startswith(closing):
            self._text, self._inside, self._past = start.removeprefix(closing), None, True
        elif not opening.startswith(start) and not closing.startswith(start):
            self._inside = False

    def _awaits_words(self) -> bool:
        """Whether the text may be the beginning of what comes before the words of the answer. All
        of that is left out."""
        start = self._text.lstrip()
        if not self._aloud:
            return False
        if start.startswith(self._aloud):
            self._text, self._past = start.removeprefix(self._aloud), True
        elif self._aloud.startswith(start):
            return True
        self._aloud = ""
        return False

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
        if tag:  # behind which more may follow, as `Heard` has it
            self._inside, self._begun, self._past = None, False, True

    def _before_ending(self) -> str:
        """What of the text is the answer's for certain."""
        ending = "" if self.reading.reasoning is None else self.reading.reasoning.ending
        text, self._text = self._text, ""
        if self._over or not ending:
            return "" if self._over else text
        words, self._over, _ = text.partition(ending)
        size = len(words.rstrip()) if self._over else len(words) - held_back(words, ending)
        self._text = "" if self._over else words[size:]
        return words[:size]

    def _spoken(self, text: str) -> list[Piece]:
        if self._past and not self._begun:
            text = text.lstrip()
        self._begun = self._begun or bool(text)
        if self.reading.calls:
            return self.calls.push(text)
        return [Piece(text)] if text else []
