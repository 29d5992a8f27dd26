"""What `data inspect` shows of prompts, which nobody has answered yet."""

from collections.abc import Sequence
from typing import Any

from medusa_kit import console
from medusa_kit.data.chat import encode_row_prompt
from medusa_kit.data.rows import BadRow, Conversation
from medusa_kit.data.text_files import PIPE, PIPED
from medusa_kit.errors import DataError, UsageError

NEXT = ("the model's answers to them are what heads are trained on: `medusa-kit train --quick` or "
        "`medusa-kit data generate` makes them")  # fmt: skip


def are_prompts(rows: Sequence[Any]) -> bool:
    """Whether rows hold prompts alone: none has an answer."""
    good = [row for row in rows if not isinstance(row, BadRow)]
    return bool(good) and all(
        isinstance(row, Conversation) and all(m["role"] != "assistant" for m in row.messages)
        for row in good
    )


def show(tokenizer: Any, source: str, rows: Sequence[Any], number: int, on_error: str) -> None:
    """The row as the model is asked, and how many tokens all rows have."""
    encoded, reasons = dict[int, list[int]](), dict[int, str]()
    for row in rows:
        try:
            encoded[row.row] = _ids(tokenizer, row)
        except DataError as error:
            if on_error == "fail":
                raise
            reasons[row.row] = error.message
    if number not in encoded:
        reason = reasons.get(number, "the source has no such row")
        raise UsageError(f"row {number} cannot be shown: {reason}")
    shown = tokenizer.decode(encoded[number], skip_special_tokens=False)
    lengths = [len(ids) for ids in encoded.values()]
    name = PIPED if source == PIPE else source
    lines = [
        shown,
        f"row {number}: a prompt of {len(encoded[number])} tokens, without an answer",
        f"{name}: {len(lengths):,} prompts of {sum(lengths):,} tokens, the longest has "
        f"{max(lengths):,}; {len(reasons):,} rows skipped",
    ]
    for line in lines:
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)
    if reasons:
        first = min(reasons)
        console.note(f"{name}: the first skipped is row {first}: {reasons[first]}")
    console.note(NEXT)


def _ids(tokenizer: Any, row: Any) -> list[int]:
    if isinstance(row, BadRow):
        raise row.error()
    return encode_row_prompt(tokenizer, row.messages, row.tools)
