"""The kinds of files that are read, each with the same rows."""

import bz2
import csv
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from medusa_kit.data.readers import Conversation, read_rows
from medusa_kit.data.sources import read_items
from medusa_kit.errors import DataError

ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}", "note": None} for n in range(3)]
JSON_LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
COLUMNS = ["prompt,completion\n", *(f"question {n},answer {n}\n" for n in range(3))]
JSON_LIST = json.dumps(ROWS, indent=1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_csv(path: Path, dialect: str) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(ROWS[0]), dialect=dialect)
        writer.writeheader()
        writer.writerows(ROWS)


def write_zst(path: Path) -> None:
    with pyarrow.output_stream(str(path), compression="zstd") as stream:
        stream.write(JSON_LINES.encode())


KINDS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_text(JSON_LINES),
    "a.ndjson": lambda path: path.write_text(JSON_LINES),
    "lines.json": lambda path: path.write_text(JSON_LINES),
    "a.json": lambda path: path.write_text(JSON_LIST),
    "in_one_line.json": lambda path: path.write_text(json.dumps(ROWS)),
    "list.jsonl": lambda path: path.write_text("\n" + JSON_LIST),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSON_LINES.encode())),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(JSON_LIST.encode())),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(JSON_LINES.encode())),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(JSON_LINES.encode())),
    "a.jsonl.zst": write_zst,
    "a.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path),
    "a.csv": lambda path: write_csv(path, "excel"),
    "numbered.csv": lambda path: path.write_text(
        "".join(f"{n},{row}" for n, row in zip(["", 0, 1, 2], COLUMNS, strict=True))
    ),
    "a.tsv": lambda path: write_csv(path, "excel-tab"),
}


def turns(source: Path, limit: int | None = None) -> list[list[tuple[str, str]]]:
    rows = list(read_rows(str(source), limit))
    assert all(isinstance(row, Conversation) for row in rows)
    return [[(m["role"], m["content"]) for m in row.messages] for row in rows]  # type: ignore


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    KINDS[name](path)
    expected = [[("user", f"question {n}"), ("assistant", f"answer {n}")] for n in range(3)]
    assert turns(path) == expected
    assert turns(path, limit=2) == expected[:2]


def test_prompts_a_line_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt.gz"
    path.write_bytes(gzip.compress(b"one\n\ntwo\n"))
    assert turns(path) == [[("user", "one")], [("user", "two")]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.xz"])
def test_json_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    KINDS[name](tmp_path / name)
    for package in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    assert len(turns(tmp_path / name)) == 3


@pytest.mark.parametrize(
    ("name", "package"), [("a.parquet", "datasets"), ("a.jsonl.zst", "pyarrow")]
)
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    KINDS[name](tmp_path / name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"needs the package {package}") as caught:
        turns(tmp_path / name)
    assert ".[train]" in (caught.value.hint or "")


OTHERS: dict[str, tuple[bytes, str]] = {
    "a.docx": (b"PK\x03\x04 \xff\xfe", "is not UTF-8 text"),
    "a.md": (b"# Heading\n", "a.md:1 is not JSON"),
    "a.parquet": (b"no table", "cannot load the data set"),
    "a.jsonl.gz": (b"no gzip", "cannot be read"),
    "a.jsonl.xz": (b"no xz", "cannot be read"),
    "a.jsonl.zst": (b"no zst", "cannot be read"),
    "half.jsonl.gz": (gzip.compress(JSON_LINES.encode())[:-12], "cannot be read"),
    "a.parquet.gz": (b"", "is a compressed table"),
    "a.csv": (b"prompt,completion\nq,a,b\n", "a.csv:2 has more fields"),
    "open.csv": (b'prompt,note\n"Why?,1\nHow?,2\n', r"open\.csv:2: "),
    "stray.csv": (b'prompt\n"Why?" she said\n', r"stray\.csv:2: "),
    "twice.csv": (b"prompt,note,prompt\na,b,c\n", "'prompt' more than once"),
    "cut.jsonl": (b'{"prompt": "Why?\n', r"Invalid control character at column 17\n"),
    "digits.jsonl": (
        b'{"prompt": "a"}\n{"prompt": "b", "n": ' + b"9" * 5000 + b"}\n",
        r"digits\.jsonl:2 is not JSON: an integer of 5,000 digits",
    ),
    "digits.json": (
        b'[{"prompt": "a"},\n {"prompt": "b", "n": ' + b"9" * 5000 + b"}]\n",
        r"digits\.json:2 is not JSON: an integer of 5,000 digits",
    ),
    "word.jsonl": (b"why?\n", r"Expecting value at column 1\n"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_is_told_what_is_read(tmp_path: Path, name: str) -> None:
    content, message = OTHERS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        turns(tmp_path / name)
    if name in ("a.docx", "a.md", "a.parquet.gz"):
        assert ".parquet" in (caught.value.hint or "")


def test_a_table_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], "string")}), path)
    with pytest.raises(DataError, match="holds no row"):
        turns(path)


@pytest.mark.parametrize("name", ["", " "])
def test_a_name_that_is_empty(name: str) -> None:
    with pytest.raises(DataError, match="expected a file or a data set"):
        list(read_rows(name))


def test_rows_of_a_table_have_no_empty_keys(tmp_path: Path) -> None:
    """A table gives each message the keys of all others."""
    call = {"function": {"name": "f", "arguments": "{}"}}
    rows = [{"messages": [{"role": "user", "content": "Q"},
                          {"role": "assistant", "content": None, "tool_calls": [call]}],
             "system": None},
            {"messages": [{"role": "user", "content": "Q"}], "system": "S"}]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = read_rows(str(tmp_path / "a.parquet"), extras=True)
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert first.messages[0] == {"role": "user", "content": "Q"}
    assert first.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert [m["role"] for m in second.messages] == ["system", "user"]


def test_a_row_of_another_form_is_told_the_forms(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"goal": "x"}\n')
    with pytest.raises(DataError, match="format is unknown; its keys are 'goal'") as caught:
        turns(path)
    for form in ("messages", "prompt", "instruction", "question", "text"):
        assert form in (caught.value.hint or "")


def test_a_file_of_that_name_nearly_is_offered(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a")
    with pytest.raises(DataError) as caught:
        list(read_items(str(tmp_path / "promts.txt")))
    assert caught.value.hint == f"did you mean {tmp_path / 'prompts.txt'}?"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\x89PNG\0", "it is not a text file (a byte 0x89)"),
     (b"caf\xe9", "it may be in another encoding (a byte 0xe9)")],
)  # fmt: skip
def test_bytes_that_are_no_text(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_items(str(tmp_path / "a.txt")))
    assert caught.value.message.endswith(said)
