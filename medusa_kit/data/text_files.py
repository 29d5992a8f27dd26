"""Items of JSON, text and CSV files, line by line, compressed too, numbered as an editor numbers
lines, or from 1 in a JSON list."""

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import lzma
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from medusa_kit.data.rows import EXAMPLES, kind_of
from medusa_kit.errors import DataError, in_one_line, not_utf8
from medusa_kit.files import parse_json
from medusa_kit.installing import extra

Item = tuple[int, Any]
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
SEPARATORS = {".csv": ",", ".tsv": "\t"}
TEXT = ".txt"
PIPE, PIPED = "-", "standard input"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
FILE_KINDS = (".jsonl", ".ndjson", ".json", TEXT, *SEPARATORS, *TABLES, *COMPRESSED)
KINDS = (
    "JSON lines (.jsonl) or a JSON list (.json), a prompt a line (.txt), .csv or .tsv, these "
    f"compressed ({', '.join(COMPRESSED)}), or a table ({', '.join(TABLES)})"
)
LONGEST_FIELD = 2**31 - 1  # characters; by default the csv module refuses more than 131,072
READ = f"files that are read: {KINDS}; {EXAMPLES}"
INSTALL = extra("train")


class CutOffError(DataError):
    """The last line of a file, which has no end, is no JSON: who wrote it was stopped."""

    row = 0  # its number


def read_file(path: Path) -> Iterator[Item]:
    inner = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
    if inner in TABLES:
        raise DataError(f"{path} is a compressed table", hint=f"unpack it; expected {KINDS}")
    try:
        with _opened(path) as lines:
            if inner in SEPARATORS:
                yield from _read_columns(path, lines, SEPARATORS[inner])
            elif inner == TEXT:
                yield from _read_text(lines)
            else:
                yield from _read_json(path, lines)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {not_utf8(error)}",
            hint=f"convert it to UTF-8; {READ}",
        ) from error
    except (EOFError, csv.Error, lzma.LZMAError, OSError) as error:
        raise DataError(f"{path} cannot be read: {in_one_line(error)}", hint=READ) from error


@functools.cache
def _piped() -> str:
    """What is piped into this process; it can be read once."""
    if sys.stdin.isatty():
        raise DataError(
            f"{PIPE!r} is standard input, and nothing is piped into it",
            hint="medusa-kit generate --prompts - < FILE, or name the file",
        )
    return sys.stdin.buffer.read().decode("utf-8-sig")


def read_pipe() -> Iterator[Item]:
    """Items of standard input: JSON where it begins so, else a prompt a line."""
    try:
        text = _piped()
    except UnicodeDecodeError as error:
        raise DataError(f"{PIPED} is not UTF-8 text: {not_utf8(error)}", hint=READ) from error
    lines = io.StringIO(text)
    if text.lstrip().startswith("{") or _is_json(text):
        yield from _read_json(Path(PIPED), lines)
    else:
        yield from _read_text(lines)


def _is_json(text: str) -> bool:
    try:
        return isinstance(parse_json(text), list)
    except ValueError:
        return False


def _read_text(lines: Iterable[str]) -> Iterator[Item]:
    yield from ((n, text) for n, line in enumerate(lines, 1) if (text := line.strip()))


def _opened(path: Path) -> IO[str]:
    openers: dict[str, Callable[..., IO[str]]] = {
        ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd
    }  # fmt: skip
    return openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="")


def _zstd(path: Path, _: str, encoding: str, newline: str) -> IO[str]:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path} needs the package pyarrow", hint=INSTALL) from error
    stream = pyarrow.input_stream(str(path), compression="zstd")
    return io.TextIOWrapper(io.BufferedReader(stream), encoding=encoding, newline=newline)


def _read_columns(path: Path, lines: Iterable[str], separator: str) -> Iterator[Item]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.DictReader(lines, delimiter=separator, strict=True)  # or an open quote takes all
    names = [name for name in reader.fieldnames or () if name]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DataError(
            f"{path}:1 names the column {twice[0]!r} more than once",
            hint=f"the first line names the columns; {EXAMPLES}",
        )
    for row in _checked(path, reader):
        row.pop("", None)  # the numbers of rows, as some write them
        if None in row:
            raise DataError(
                f"{path}:{reader.line_num} has more fields than the first line",
                hint=f"the first line names the columns; {EXAMPLES}",
            )
        yield reader.line_num, {name: value for name, value in row.items() if value is not None}


def _checked(path: Path, reader: Any) -> Iterator[dict[Any, Any]]:
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num + 1}: {error}",
            hint="a field that begins with a quote ends with one; a quote in it is written twice",
        ) from error


def _read_json(path: Path, lines: Iterable[str]) -> Iterator[Item]:
    """JSON lines, or one JSON list, whatever the file is called."""
    numbered = enumerate(lines, start=1)
    first = next(((n, line) for n, line in numbered if line.strip()), None)
    if first is None:
        return
    number, line = first
    second = next(((n, line) for n, line in numbered if line.strip()), None)
    if _begins_a_list(path, line, alone=second is None):
        remaining = itertools.chain([] if second is None else [second], numbered)
        gap = "\n" * (0 if second is None else second[0] - number - 1)
        text = "\n" * (number - 1) + line + gap + "".join(line for _, line in remaining)
        yield from _read_list(path, text)
        return
    for number, line in itertools.chain([first], [] if second is None else [second], numbered):
        if line.strip():
            yield number, _parsed(path, number, line)


def _begins_a_list(path: Path, line: str, alone: bool) -> bool:
    """Whether a file's first line is no row of its own."""
    if not (line.lstrip().startswith("[") or ".json" in path.suffixes):
        return False
    try:
        return isinstance(parse_json(line), list) and alone
    except json.JSONDecodeError:
        return True


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return parse_json(line)
    except json.JSONDecodeError as error:
        kind = DataError if line.endswith(("\n", "\r")) else CutOffError
        fault = kind(f"{path}:{number} is not JSON: {_reason(error)}", hint=READ)
        if isinstance(fault, CutOffError):
            fault.row = number
        raise fault from error


def _reason(error: json.JSONDecodeError) -> str:
    """The reason and column of a JSON error; some of Python's messages end in "at"."""
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


def _read_list(path: Path, text: str) -> Iterator[Item]:
    try:
        items = parse_json(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno} is not JSON: {_reason(error)}", hint=READ
        ) from error
    if not isinstance(items, list):
        raise DataError(
            f"{path} holds {kind_of(items)}, expected a list of rows, or a row on each line",
            hint=READ,
        )
    yield from enumerate(items, start=1)
