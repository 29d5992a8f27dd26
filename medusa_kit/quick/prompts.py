"""Prompts of a quick run: which are trained on, which are kept out.

A hash of its id (of its text, where it has none) decides, so the same prompts are kept out by every
run on the file. The hash is also the order in which prompts are answered, since answers stop when
their time is over and files are often sorted by kind.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_kit.data.readers import Conversation, Message, read_good_and_bad
from medusa_kit.distill.generate import asked_messages
from medusa_kit.errors import DataError

FEWEST = 8  # prompts
KEPT_OUT, MOST_KEPT_OUT = 0.1, 500  # share and number of prompts
TESTED, MOST_TESTED = 0.2, 80  # of these: for verify and bench, not for calibration


@dataclass(frozen=True)
class Prompts:
    """`training` is trained on; trees are found on `calibration`, everything measured on `test`."""

    source: str
    training: list[Conversation]
    calibration: list[Conversation]
    test: list[Conversation]
    digest: str  # of all of them
    skipped: int  # rows that are no prompts


def read_prompts(source: str) -> Prompts:
    """Raises DataError for a missing or broken source and for too few prompts."""
    rows, skipped = list[tuple[Conversation, list[Message]]](), 0
    for row in read_good_and_bad(source):
        try:
            if not isinstance(row, Conversation):
                raise DataError("no prompt")
            rows.append((row, asked_messages(row.messages, "first")))
        except DataError:
            skipped += 1
    if len(rows) < FEWEST:
        raise DataError(
            f"{source} has {len(rows)} prompts ({skipped} rows are none); expected {FEWEST} or "
            "more, some of which are kept out",
            hint="a few hundred give first heads, ten thousand good ones",
        )
    return _divided(source, rows, skipped)


def _divided(
    source: str, rows: Sequence[tuple[Conversation, list[Message]]], skipped: int
) -> Prompts:
    whole = json.dumps([(row.id, messages) for row, messages in rows])
    count = min(MOST_KEPT_OUT, max(FEWEST // 2, round(KEPT_OUT * len(rows))))
    ordered = sorted(rows, key=lambda item: _hash(*item))
    names = list(dict.fromkeys(_name(*item) for item in ordered))  # rows may share an id
    kept = set(names[:count])
    texts = {_text(messages) for row, messages in ordered if _name(row, messages) in kept}
    out = [row for row, messages in ordered if _name(row, messages) in kept]
    training = [row for row, messages in ordered
                if _name(row, messages) not in kept and _text(messages) not in texts]  # fmt: skip
    tested = min(MOST_TESTED, max(1, round(TESTED * len(out))))
    if not training or len(out) - tested < 2:
        raise DataError(
            f"{source} has {len(names)} different prompts, too few to keep some out",
            hint=f"expected {FEWEST} or more",
        )
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return Prompts(source, training, out[tested:], out[:tested], digest, skipped)


def _text(messages: Sequence[Message]) -> str:
    return json.dumps(list(messages), sort_keys=True)


def _name(row: Conversation, messages: Sequence[Message]) -> str:
    return _text(messages) if row.id is None else f"id {row.id}"


def _hash(row: Conversation, messages: Sequence[Message]) -> str:
    return hashlib.sha256(_name(row, messages).encode()).hexdigest()
