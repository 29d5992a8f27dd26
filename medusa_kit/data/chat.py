"""Chat messages -> token ids and the loss mask, always through the model's own chat template.

The mask is True on the tokens the assistant wrote, its end-of-turn token included (turns.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from medusa_kit.data.rendered import Rendered
from medusa_kit.data.rows import EXAMPLES, BadRow, Conversation, Message, Row, text_of
from medusa_kit.data.shown import check_shown, is_plain, renderable
from medusa_kit.data.template import as_texts, chat_template, render
from medusa_kit.data.turns import written
from medusa_kit.errors import DataError

MAX_REASONS = 8  # for skipped rows, that are listed


@dataclass(frozen=True)
class EncodedExample:
    """`loss_mask[t]`: whether the assistant wrote token t, so that heads learn to predict it.
    `turn_starts`: tokens that begin a turn right behind another's end, where a template has nothing
    between two answers in a row."""

    input_ids: list[int]
    loss_mask: list[bool]
    row: int
    is_edited: bool = False  # whether the template writes other words than the row has
    turn_starts: tuple[int, ...] = ()


@dataclass
class SourceCount:
    """How many rows of one source were kept and skipped."""

    kept: int = 0
    skipped: int = 0
    first: DataError | None = None  # why the first skipped row was skipped
    unused: set[str] = field(default_factory=set)  # keys of its rows that were left out


@dataclass
class EncodeReport:
    """How rows were encoded: counts of rows and tokens, and why rows were skipped."""

    skipped: list[tuple[int, str]] = field(default_factory=list)  # (row, reason)
    truncated: int = 0  # rows longer than max_length, emptied ones included
    emptied: int = 0  # truncated rows in which nothing to train on was left
    longest: int = 0  # tokens of the longest row, before any cut
    tokens: int = 0
    trained_tokens: int = 0
    trained_tokens_cut: int = 0  # tokens of the assistant after max_length
    sources: dict[str, SourceCount] = field(default_factory=dict)
    edited: list[int] = field(default_factory=list)  # rows

    def skips(self) -> list[str]:
        """A line on each reason for which rows were skipped, the commonest first."""
        rows: dict[str, list[int]] = {}
        for row, message in self.skipped:
            reason = re.sub(rf"^(row {row}: |.*?:{row}: )", "", message)
            reason = re.sub(rf"^row {row} ", "it ", reason)
            rows.setdefault(reason, []).append(row)
        common = sorted(rows.items(), key=lambda item: -len(item[1]))
        lines = [
            f"{len(numbers):,} rows skipped, the first is row {numbers[0]}: {reason}"
            for reason, numbers in common[:MAX_REASONS]
        ]
        if len(common) > MAX_REASONS:
            others = sum(len(numbers) for _, numbers in common[MAX_REASONS:])
            lines.append(f"{others:,} rows skipped for {len(common) - MAX_REASONS} other reasons")
        return lines

    def notes(self) -> list[str]:
        """Lines on parts of rows that are not trained on, though no row was skipped for them."""
        lines = [
            f"{source}: the keys {', '.join(map(repr, sorted(count.unused)))} of rows are not used"
            for source, count in self.sources.items()
            if count.unused
        ]
        if self.edited:
            lines.append(
                f"the chat template changes the words of {len(self.edited):,} rows, as templates "
                f"do that leave out earlier thoughts (the first is row {self.edited[0]}): what it "
                "writes is trained on"
            )
        return lines

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
        prompt = as_texts(prompt)
        if len(prompt) == 1:
            return list(tokenizer(text_of(prompt[0].get("content"))).input_ids)
        raise DataError(
            f"{len(prompt)} messages, but this tokenizer has no chat template",
            hint="such a model continues one plain text: give one message and no system message",
        )
    return render(tokenizer, prompt, add_generation_prompt=True)


def encode_row_prompt(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """Token ids of a row's prompt, ready for the answer.

    Raises DataError where the template refuses it or leaves out a part of it.
    """
    if chat_template(tokenizer) is None:
        if tools or not is_plain(messages):
            raise DataError("it has tools, calls or names, but this tokenizer has no chat template")
        return encode_prompt(tokenizer, messages)
    view = Rendered(tokenizer, tools)
    messages, text = renderable(view, messages)
    check_shown(view, messages, text)
    return render(tokenizer, messages, add_generation_prompt=True, tools=view.tools)


def encode_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    row: int = 0,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> EncodedExample:
    """A whole conversation and its loss mask, ending with the last assistant turn trained on.

    A message of `weight` 0 is not trained on. Raises DataError, naming the row, where there is no
    assistant turn, or the template refuses it or leaves out a part of it.
    """
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if last is None:
        raise DataError(
            f"row {row} has no assistant turn, so there is nothing to train on",
            hint="`medusa-kit data generate` lets the model answer prompts; `train --quick` does "
            f"so itself; {EXAMPLES}",
        )
    if chat_template(tokenizer) is None:
        raise DataError(
            "this tokenizer has no chat template, so a conversation has no tokens",
            hint="train on answers from `medusa-kit data generate`",
        )
    try:
        found = written(Rendered(tokenizer, tools), messages[: last + 1])
    except DataError as error:
        raise DataError(f"row {row}: {error.message}", hint=error.hint) from error
    return EncodedExample(found.ids, found.mask, row, found.is_edited, found.turn_starts)


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
            count.first = count.first or error
            continue
        examples.append(example)
        count.kept += 1
        if isinstance(row, Conversation):
            count.unused.update(row.unused)
        if example.is_edited:
            report.edited.append(row.row)
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
        reason = f", the first: {count.first.message}" if count.first else ""
        raise DataError(
            f"{name}no row is left to train on ({count.skipped} skipped{reason})",
            hint=(count.first and count.first.hint) or EXAMPLES,
        )


def _encode_row(row: Row | BadRow, tokenizer: Any) -> EncodedExample:
    if isinstance(row, BadRow):
        raise row.error()
    if isinstance(row, Conversation):
        return encode_conversation(tokenizer, row.messages, row.row, row.tools)
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
    return replace(example, input_ids=example.input_ids[:max_length], loss_mask=mask)
