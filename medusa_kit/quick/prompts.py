"""Prompts of a quick run: which are trained on, which are held out.

A hash of its id (of its text, where it has none) decides, so the same prompts are held out by every
run on the file. The hash is also the order in which prompts are answered, since answers stop when
their time is over and files are often sorted by kind.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_kit.data.readers import (
    AnswerRow,
    BadRow,
    Conversation,
    Message,
    Row,
    read_good_and_bad,
)
from medusa_kit.data.row_keys import refuse_extras
from medusa_kit.data.rows import EXAMPLES
from medusa_kit.distill.generate import asked_messages
from medusa_kit.equal_rows import held_out as kept_out
from medusa_kit.errors import DataError

MIN_PROMPTS = 8  # prompts
KEPT_OUT, MAX_KEPT_OUT = 0.1, 500  # share and number of prompts
TESTED, MAX_TESTED = 0.2, 80  # of these: for verify and bench, not for calibration
MIN_TESTED = 8  # where there are enough: a quarter of all is kept out, and half of that tested


@dataclass(frozen=True)
class Prompts:
    """`training` is trained on; trees are found on `calibration`, everything measured on `test`."""

    source: str
    training: list[Row]
    calibration: list[Row]
    test: list[Row]
    digest: str  # of all of them
    skipped: int  # rows that are no prompts
    first_skipped: str | None  # which is the first, and why
    repeated: int  # rows that ask what an earlier one asked
    answered: bool = False  # whether they are answers already (answered.py)
    earlier: bool = False  # divided as earlier versions did

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answers to train on; 0 where they are still to be made."""
        return sum(len(row.response_ids) for row in self.training if isinstance(row, AnswerRow))


Asked = tuple[Conversation, list[Message]]  # a row, and what the model is asked


def read_prompts(source: str, earlier: bool = False) -> Prompts:
    """The prompts of a source, divided; `earlier`: as earlier versions did. Raises DataError for a
    missing or broken source and for too few prompts."""
    rows, refused = list[Asked](), list[tuple[int, DataError]]()
    for row in read_good_and_bad(source, extras=True):
        try:
            rows.append(_prompt_of(row))
        except DataError as error:
            refused.append((row.row, error))
    unique = dict[str, Asked]()  # the same question again has the same greedy answer
    for item in sorted(rows, key=lambda item: _hash(*item)):
        unique.setdefault(_text(item[1]), item)
    if len(unique) < MIN_PROMPTS:
        first = f", the first is {_row_and_reason(*refused[0])}" if refused else ""
        hint = refused[0][1].hint if refused else None
        raise DataError(
            f"{source} has {len(unique)} unique prompts (unreadable rows: {len(refused)}{first})"
            f"; at least {MIN_PROMPTS} are needed, because some are held out",
            hint=hint or f"a few hundred give first heads, ten thousand good ones; {EXAMPLES}",
        )
    training, calibration, test = divided(
        source, [(_name(*item), item[0]) for item in unique.values()], earlier
    )
    whole = json.dumps([(row.id, messages) for row, messages in rows])
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    first_skipped = _row_and_reason(*refused[0]) if refused else None
    return Prompts(source, training, calibration, test, digest, len(refused), first_skipped,
                   len(rows) - len(unique), earlier=earlier)  # fmt: skip


def _row_and_reason(row: int, error: DataError) -> str:
    return f"row {row}: {error.message}"


def _prompt_of(row: Row | BadRow) -> Asked:
    if isinstance(row, BadRow):
        raise DataError(row.reason, hint=row.hint)
    if not isinstance(row, Conversation):
        raise DataError("it is an answer already, expected a prompt", hint=EXAMPLES)
    messages = asked_messages(row.messages, "first")
    refuse_extras(messages, row.tools)
    return row, messages


def divided(
    source: str, ordered: Sequence[tuple[str, Row]], earlier: bool = False
) -> tuple[list[Row], list[Row], list[Row]]:
    """(to train on, for calibration, to measure on), of named rows in their order. Rows of one name
    are held out together. `earlier`: no more of few than earlier versions kept out, whose runs may
    have trained on others."""
    least = 0 if earlier else MIN_TESTED
    few = max(MIN_PROMPTS // 2, min(2 * least, len(ordered) // 4))
    count = min(MAX_KEPT_OUT, max(few, round(KEPT_OUT * len(ordered))))
    groups = dict[str, list[int]]()
    for index, (name, _) in enumerate(ordered):
        groups.setdefault(name, []).append(index)
    chosen = kept_out([*groups.values()], range(len(groups)), count)
    held_out = [row for index, (_, row) in enumerate(ordered) if index in chosen]
    training = [row for index, (_, row) in enumerate(ordered) if index not in chosen]
    if not training:
        raise DataError(
            f"{source} has {len(ordered)} prompts, but only {len(groups)} different ids, too few "
            "to keep some out",
            hint="give each prompt an id of its own, or leave ids out",
        )
    few = max(1, min(least, len(held_out) // 2))
    tested = min(MAX_TESTED, max(few, round(TESTED * len(held_out))))
    return training, held_out[tested:], held_out[:tested]


def _text(messages: Sequence[Message]) -> str:
    return json.dumps(list(messages), sort_keys=True)


def _name(row: Conversation, messages: Sequence[Message]) -> str:
    return _text(messages) if row.id is None else f"id {row.id}"


def _hash(row: Conversation, messages: Sequence[Message]) -> str:
    return hashlib.sha256(_name(row, messages).encode()).hexdigest()
