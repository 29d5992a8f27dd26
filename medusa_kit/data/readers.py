"""Rows from files and data sets in any known format: conversations, or answers with token ids.

The format is recognised row by row: ShareGPT (`conversations`: from, value), OpenAI (`messages`:
role, content), a single `prompt`, MT-bench's `turns`, the kit's own answer rows (`prompt_ids`,
`response_ids`), and plain text with a prompt on each line. A source that is not a path is the name
of a `datasets` data set, `[owner/]name[/config][:split]`.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from medusa_kit.errors import ConfigError, DataError, unknown_value
from medusa_kit.files import parse_json

Message = dict[str, str]
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
         "model": "assistant", "system": "system", "tool": "tool"}  # fmt: skip
FILE_KINDS = (".jsonl", ".json", ".txt")
FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form. `row` counts from 1, as an editor counts lines."""

    messages: list[Message]
    row: int
    id: str | None
    source: str
    category: str | None = None  # in MT-bench, Spec-Bench and sets in their form


@dataclass(frozen=True)
class AnswerRow:
    """An answer the base model wrote: its own tokens, the stop token included."""

    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str  # stop | length
    id: str | None
    row: int
    sampling: dict[str, Any] | None = None
    source: str = field(default="", compare=False)  # where it was read


@dataclass(frozen=True)
class BadRow:
    """A row of no known format, and the reason."""

    reason: str
    row: int
    source: str
    hint: str | None = None

    def error(self) -> DataError:
        return DataError(f"{self.source}:{self.row}: {self.reason}", hint=self.hint)


Row: TypeAlias = Conversation | AnswerRow


def read_rows(source: str, limit: int | None = None, streaming: bool = False) -> Iterator[Row]:
    """Rows of a file or data set, in order, at most `limit`.

    With `streaming` a data set is read row by row, not downloaded whole; files are not affected.

    Raises DataError for a missing, empty or broken source, and for a row of no known format, with
    its number and keys. Raises ConfigError for a streamed data set without a limit.
    """
    for row in read_good_and_bad(source, limit, streaming):
        if isinstance(row, BadRow):
            raise row.error()
        yield row


def read_good_and_bad(
    source: str, limit: int | None = None, streaming: bool = False
) -> Iterator[Row | BadRow]:
    """The same, with a BadRow for each row of no known format, for callers that skip such rows."""
    path = Path(source).expanduser()
    looks_like_path = path.suffix in FILE_KINDS or source.startswith((".", "/", "~"))
    if path.is_file():
        raw = _read_file(path)
    elif looks_like_path and not _is_folder(source):
        raise DataError(f"no data file at {source}", hint="check the path")
    else:
        raw = _read_data_set(source, limit, streaming)
    rows = (_row(item, number, source) for number, item in raw)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{source} holds no row", hint="give at least one prompt or conversation")
    yield from itertools.islice(itertools.chain([first], rows), limit)


def _is_folder(source: str) -> bool:
    return Path(source.partition(":")[0]).expanduser().is_dir()


def _read_file(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from _read_json(path) if path.suffix == ".json" else _read_lines(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}", hint="convert it to UTF-8") from error


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if path.suffix == ".txt":
                yield number, line.strip()
                continue
            try:
                yield number, parse_json(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number} is not JSON: {error.msg}") from error


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        items = parse_json(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno} is not JSON: {error.msg}") from error
    if not isinstance(items, list):
        raise DataError(f"{path} holds a {type(items).__name__}, expected a list of rows")
    yield from enumerate(items, start=1)


def _read_data_set(source: str, limit: int | None, streaming: bool) -> Iterator[tuple[int, Any]]:
    if streaming and limit is None:
        raise ConfigError(
            f"the data set {source!r} is streamed without a limit, so it might never end",
            hint="set data.limit, or a limit on this source",
        )
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{source!r} is not a file, and reading it as a data set needs the package datasets",
            hint="pip install 'medusa-kit[train]', or give a .jsonl, .json or .txt file",
        ) from error
    name, _, split = source.partition(":")
    options = {"split": split or "train"} | ({"streaming": True} if streaming else {})
    parts = name.split("/")
    config = parts.pop() if len(parts) == 3 and not _is_folder(source) else None
    try:
        rows = datasets.load_dataset("/".join(parts) if config else name, config, **options)
        yield from enumerate(rows, start=1)  # a stream may fail at any row
    except Exception as error:  # datasets raises many kinds: missing, offline, wrong split
        raise DataError(
            f"cannot load the data set {source!r}: {error}",
            hint="name[/config][:split] as on the Hub, a folder, or a file",
        ) from error


def _row(item: Any, number: int, source: str) -> Row | BadRow:
    try:
        return _good_row(item, number, source)
    except DataError as error:
        return BadRow(error.message, number, source, error.hint)


def _good_row(item: Any, number: int, source: str) -> Row:
    if isinstance(item, str):
        return Conversation([{"role": "user", "content": item}], number, None, source)
    if not isinstance(item, dict):
        raise DataError(f"it holds a {type(item).__name__}, expected an object or a string")
    identity = item.get("id", item.get("question_id"))
    identity = None if identity is None else str(identity)
    if "response_ids" in item:
        return _answer(item, identity, number, source)
    category = item.get("category")
    category = category if isinstance(category, str) else None
    return Conversation(_messages(item), number, identity, source, category)


def _messages(item: dict[str, Any]) -> list[Message]:
    for key, role_key, content_key in (("messages", "role", "content"),
                                       ("conversations", "from", "value")):  # fmt: skip
        if item.get(key) is not None:
            turns = _listed(item, key)
            return [_message(turn, role_key, content_key) for turn in turns]
    if item.get("turns"):
        return [{"role": "user", "content": str(_listed(item, "turns")[0])}]
    if isinstance(item.get("prompt"), str):
        return [{"role": "user", "content": item["prompt"]}]
    raise DataError(
        f"its format is unknown; its keys are {', '.join(map(repr, item)) or 'none'}",
        hint="expected messages, conversations, prompt, turns or response_ids",
    )


def _listed(item: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(item[key], list):
        raise DataError(f"{key} is a {type(item[key]).__name__}, expected a list")
    return item[key]


def _message(turn: Any, role_key: str, content_key: str) -> Message:
    try:
        role, content = turn[role_key], turn[content_key]
    except (KeyError, TypeError) as error:
        raise DataError(f"a turn lacks {role_key!r} or {content_key!r}") from error
    if not isinstance(role, str) or role not in ROLES:
        raise unknown_value("role", role, ROLES, kind=DataError)
    if not isinstance(content, str):
        raise DataError(f"content is a {type(content).__name__}, expected text")
    return {"role": ROLES[role], "content": content}


def _answer(item: dict[str, Any], identity: str | None, number: int, source: str) -> AnswerRow:
    prompt_ids, response_ids = item.get("prompt_ids"), item["response_ids"]
    for name, ids in (("prompt_ids", prompt_ids), ("response_ids", response_ids)):
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise DataError(f"{name} must be a list of token ids")
    reason = item.get("finish_reason")
    if reason not in FINISH_REASONS:
        raise DataError(f"finish_reason is {reason!r}; expected one of {FINISH_REASONS}")
    assert isinstance(prompt_ids, list)
    return AnswerRow(
        prompt_ids, response_ids, reason, identity, number, item.get("sampling"), source
    )
