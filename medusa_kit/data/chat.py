"""Chat messages -> token ids and the loss mask, always through the model's own chat template.

The mask is True on the tokens the assistant wrote, its end-of-turn token included. It comes from
the template's {% generation %} marks where it has them, else from rendering the conversation up to
each turn; never from searching text.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_kit.base.tokenizer.turn_end import end_of_turn, special_ids
from medusa_kit.data.readers import BadRow, Conversation, Message, Row
from medusa_kit.data.template import chat_template, check_characters, refusals, render
from medusa_kit.errors import DataError

GENERATION_MARK = re.compile(r"{%[-+]?\s*generation\b")


@dataclass(frozen=True)
class EncodedExample:
    """`loss_mask[t]`: whether the assistant wrote token t, so that heads learn to predict it."""

    input_ids: list[int]
    loss_mask: list[bool]
    row: int


@dataclass
class SourceCount:
    """What became of the rows of one source."""

    kept: int = 0
    skipped: int = 0
    first_reason: str = ""  # why the first skipped row was skipped


@dataclass
class EncodeReport:
    """What became of the rows."""

    skipped: list[tuple[int, str]] = field(default_factory=list)  # (row, reason)
    truncated: int = 0  # rows longer than max_length, emptied ones included
    emptied: int = 0  # truncated rows in which nothing to train on was left
    longest: int = 0  # tokens of the longest row, before any cut
    tokens: int = 0
    trained_tokens: int = 0
    trained_tokens_cut: int = 0  # tokens of the assistant after max_length
    sources: dict[str, SourceCount] = field(default_factory=dict)

    def summary(self, max_length: int) -> str:
        """One line on what is trained on, and what the cut at `max_length` cost."""
        kept = sum(count.kept for count in self.sources.values())
        lost = self.trained_tokens_cut / (self.trained_tokens + self.trained_tokens_cut)
        return (
            f"{kept:,} rows, {self.trained_tokens:,} trained tokens "
            f"({self.trained_tokens / self.tokens:.1%} of {self.tokens:,}); "
            f"{self.truncated:,} truncated at {max_length:,} tokens, "
            f"{lost:.1%} of the trained tokens lost"
        )


def check_ids(ids: Sequence[int], vocab_size: int, row: int) -> None:
    """Raises DataError for a token id outside the vocabulary."""
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise DataError(
            f"row {row} holds the token id {wrong[0]}; the model has ids 0 to {vocab_size - 1}",
            hint="the row was made with another model's tokenizer",
        )


def encode_prompt(tokenizer: Any, prompt: Sequence[Message] | str) -> list[int]:
    """Token ids of a prompt, ready for the answer.

    A string is one user message where there is a template, plain text where there is none. Raises
    DataError where the template refuses, or for several messages without a template.
    """
    template = chat_template(tokenizer)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if template is None:
        check_characters(prompt)
        if len(prompt) == 1:
            return list(tokenizer(prompt[0]["content"]).input_ids)
        raise DataError(
            f"{len(prompt)} messages, but this tokenizer has no chat template",
            hint="give plain text, or a model with a chat template",
        )
    return render(tokenizer, prompt, add_generation_prompt=True)


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], row: int = 0
) -> EncodedExample:
    """A whole conversation and its loss mask, ending with the last assistant turn.

    Raises DataError, naming the row, where there is no assistant turn or the template refuses.
    """
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if last is None:
        raise DataError(f"row {row} has no assistant turn, so there is nothing to train on")
    template = chat_template(tokenizer)
    if template is None:
        raise DataError(
            "this tokenizer has no chat template, so a conversation has no tokens",
            hint="train on answers from `medusa-kit data generate`",
        )
    messages = list(messages[: last + 1])
    try:
        if GENERATION_MARK.search(template):
            ids, mask = _masked_by_template(tokenizer, messages)
        else:
            ids, mask = _masked_by_prefixes(tokenizer, messages)
    except DataError as error:
        raise DataError(f"row {row}: {error.message}", hint=error.hint) from error
    if not any(mask):
        raise DataError(f"row {row}: the assistant's turns have no tokens")
    return EncodedExample(ids, mask, row)


def _masked_by_template(
    tokenizer: Any, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    with refusals():
        encoded = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )  # fmt: skip
    ids, mask = list(encoded["input_ids"]), [bool(m) for m in encoded["assistant_masks"]]
    offsets, stops = encoded["offset_mapping"], special_ids(tokenizer)
    for position in range(1, len(ids)):
        if not mask[position - 1] or mask[position]:
            continue
        # transformers leaves out all but the first token of a run's last character
        same_character = offsets[position][0] < offsets[position - 1][1]
        # the end-of-turn token may be outside the marks
        ends_turn = ids[position] in stops and ids[position - 1] not in stops
        mask[position] = same_character or ends_turn
    end = max((i for i, written in enumerate(mask) if written), default=-1) + 1
    return ids[:end], mask[:end]


def _masked_by_prefixes(
    tokenizer: Any, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """Each assistant turn is what its rendering adds to the rendering of the turns before it."""
    ids = render(tokenizer, messages)
    mask, end = [False] * len(ids), 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], add_generation_prompt=True)
        until = render(tokenizer, messages[: index + 1])
        if ids[: len(before)] != before or ids[: len(until)] != until:
            raise DataError(
                "the chat template renders earlier turns differently once later ones follow, so "
                "the assistant's tokens cannot be told apart",
                hint="use single turns, or a template with {% generation %} marks",
            )
        end = _end_of_turn(tokenizer, until, len(before))
        mask[len(before) : end] = [True] * (end - len(before))
    return ids[:end], mask[:end]


def _end_of_turn(tokenizer: Any, ids: Sequence[int], start: int) -> int:
    """The place after the token that ends turns, else after the turn's last special token; the rest
    is only the template's own tail."""
    end = end_of_turn(tokenizer)
    specials = {end} if end in ids[start:] else special_ids(tokenizer)
    for position in range(len(ids) - 1, start - 1, -1):
        if ids[position] in specials:
            return position + 1
    return len(ids)


def encode_rows(
    rows: Iterable[Row | BadRow],
    tokenizer: Any,
    max_length: int,
    on_error: str = "skip",
    vocab_size: int | None = None,
) -> tuple[list[EncodedExample], EncodeReport]:
    """Encode all rows, cut at `max_length` tokens; bad rows are skipped and counted, or fatal.

    With `vocab_size`, a row with a token id outside the vocabulary is bad.

    Raises DataError for a bad row with on_error="fail", and where a source, or all together, leave
    nothing to train on.
    """
    examples, report = [], EncodeReport()
    for row in rows:
        count = report.sources.setdefault(row.source, SourceCount())
        try:
            example = _encode_row(row, tokenizer)
            if vocab_size is not None:
                check_ids(example.input_ids, vocab_size, row.row)
            report.longest = max(report.longest, len(example.input_ids))
            if len(example.input_ids) > max_length:
                report.truncated += 1
                report.emptied += not any(example.loss_mask[:max_length])
                report.trained_tokens_cut += sum(example.loss_mask[max_length:])
                example = _cut(example, max_length)
        except DataError as error:
            if on_error == "fail":
                raise
            report.skipped.append((row.row, error.message))
            count.skipped += 1
            count.first_reason = count.first_reason or error.message
            continue
        examples.append(example)
        count.kept += 1
        report.tokens += len(example.input_ids)
        report.trained_tokens += sum(example.loss_mask)
    _refuse_empty(report.sources or {"": SourceCount()})
    return examples, report


def _refuse_empty(sources: dict[str, SourceCount]) -> None:
    """A source without rows to train on is an error, even if other sources have some."""
    for source, count in sources.items():
        if count.kept:
            continue
        name = f"{source}: " if source else ""
        reason = f", the first: {count.first_reason}" if count.skipped else ""
        raise DataError(
            f"{name}no row is left to train on ({count.skipped} skipped{reason})",
            hint="`medusa-kit data inspect` shows what is trained on",
        )


def _encode_row(row: Row | BadRow, tokenizer: Any) -> EncodedExample:
    if isinstance(row, BadRow):
        raise row.error()
    if isinstance(row, Conversation):
        return encode_conversation(tokenizer, row.messages, row.row)
    if not row.response_ids:
        raise DataError(f"row {row.row} has an empty answer")
    mask = [False] * len(row.prompt_ids) + [True] * len(row.response_ids)
    return EncodedExample([*row.prompt_ids, *row.response_ids], mask, row.row)


def _cut(example: EncodedExample, max_length: int) -> EncodedExample:
    mask = example.loss_mask[:max_length]
    if not any(mask):
        raise DataError(
            f"row {example.row}: none of the first {max_length} tokens is the assistant's"
        )
    return EncodedExample(example.input_ids[:max_length], mask, example.row)
