"""Rows from files and data sets in any known form: conversations, or answers with token ids.

sources.py reads files and data sets, row_forms.py recognises the form of each row. A source that is
not a path is the name of a `datasets` data set, `[owner/]name[/config][:split]`.
"""

import itertools
from collections.abc import Iterator

from medusa_kit.data.row_forms import read_item
from medusa_kit.data.rows import EXAMPLES, AnswerRow, BadRow, Conversation, Message, Row
from medusa_kit.data.sources import read_items
from medusa_kit.data.text_files import PIPE, PIPED
from medusa_kit.errors import DataError

__all__ = ["AnswerRow", "BadRow", "Conversation", "Message", "Row", "read_good_and_bad",
           "read_rows"]  # fmt: skip


def read_rows(
    source: str, limit: int | None = None, streaming: bool = False, extras: bool = False
) -> Iterator[Row]:
    """Rows of a file or data set, in order, at most `limit`.

    With `streaming` a data set is read row by row, not downloaded whole; files are not affected.
    `extras`: rows may have tools, and messages tool calls, names and reasoning, which the caller
    shows to the model or refuses; without it such a row is of no known format.

    Raises DataError for a missing, empty or broken source, and for a row of no known format, with
    its number and keys. Raises ConfigError for a streamed data set without a limit.
    """
    for row in read_good_and_bad(source, limit, streaming, extras):
        if isinstance(row, BadRow):
            raise row.error()
        yield row


def read_good_and_bad(
    source: str, limit: int | None = None, streaming: bool = False, extras: bool = False
) -> Iterator[Row | BadRow]:
    """Rows as `read_rows` gives them, with a BadRow in place of each row of no known format, for
    callers that skip such rows."""
    items = read_items(source, limit, streaming)
    source = PIPED if source == PIPE else source
    rows = (read_item(item, number, source, extras) for number, item in items)
    first = next(rows, None)
    if first is None:
        raise DataError(
            f"{source} holds no row", hint=f"give at least one prompt or conversation; {EXAMPLES}"
        )
    yield from itertools.islice(itertools.chain([first], rows), limit)
