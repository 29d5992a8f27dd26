"""A null that a row has in a tool or a call is shown to the model, whatever the row is kept in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from medusa_kit.data.readers import read_rows
from medusa_kit.data.tables import _note_doubt
from medusa_kit.errors import DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    _note_doubt.cache_clear()


def row_of(arguments: dict[str, Any], parameter: dict[str, Any]) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    parameters = {"type": "object", "properties": {"a": parameter}}
    return {
        "messages": [
            {"role": "user", "content": "w?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "system": None,
    }


ROWS = [
    row_of({"a": 1, "b": None}, {"type": "integer", "default": None}),
    row_of({"a": 2, "b": 3}, {"type": "integer", "default": 4}),
    row_of({"a": None, "b": None}, {"type": "integer", "default": 0}),
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def folder(path: Path, name: str, text: str) -> str:
    path.mkdir()
    (path / name).write_text(text)
    return str(path)


def in_json_columns(path: Path) -> str:
    kinds = {"messages": datasets.List(datasets.Json()), "tools": datasets.Json(),
             "system": datasets.Value("string")}  # fmt: skip
    table = datasets.Dataset.from_list(ROWS, features=datasets.Features(kinds))
    table.to_parquet(path / "json.parquet")
    return str(path / "json.parquet")


SOURCES: dict[str, Callable[[Path], str]] = {
    "a folder of lines": lambda path: folder(path / "a", "x.jsonl", LINES),
    "a folder of a list": lambda path: folder(path / "a", "x.json", json.dumps(ROWS, indent=1)),
    "a slice of one": lambda path: folder(path / "a", "x.jsonl", LINES) + ":train[:3]",
    "a split of one": lambda path: folder(path / "a", "test.jsonl", LINES) + ":test",
    "columns of JSON": in_json_columns,
}


def shown(source: str, **options: Any) -> list[tuple[Any, Any]]:
    return [
        (row.messages[1]["tool_calls"][0]["function"]["arguments"],  # type: ignore[union-attr]
         row.tools[0]["function"]["parameters"]["properties"]["a"])  # type: ignore
        for row in read_rows(source, extras=True, **options)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", SOURCES)
def test_real_nulls_are_kept(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = SOURCES[kind](tmp_path)
    (tmp_path / "rows.jsonl").write_text(LINES)
    expected = shown(str(tmp_path / "rows.jsonl"))
    assert expected[0] == ({"a": 1, "b": None}, {"type": "integer", "default": None})
    assert shown(source) == expected
    assert shown(source, limit=2, streaming=True) == expected[:2]
    assert "real nulls" not in capsys.readouterr().err


def test_a_slice_has_its_rows(tmp_path: Path) -> None:
    source = folder(tmp_path / "a", "x.jsonl", LINES)
    assert shown(f"{source}:train[1:]+train[:1]") == [*shown(source)[1:], shown(source)[0]]
    with pytest.raises(DataError, match="Unknown split"):
        shown(f"{source}:other")


def test_a_table_that_cannot_tell_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "structs.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    for _ in range(2):
        assert shown(path)[0] == ({"a": 1}, {"type": "integer"})
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("these keys are left out, real nulls among them") == 1
    assert "the first is row 1" in said


def test_nothing_is_said_of_keys_that_mean_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": [{"role": "user", "content": "w?", "name": None}], "system": "s"},
            {"messages": [{"role": "user", "content": "w?", "name": "n"}]}]  # fmt: skip
    path = tmp_path / "structs.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert len(list(read_rows(str(path), extras=True))) == 2
    assert "null" not in capsys.readouterr().err


def test_a_broken_line_in_a_folder_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "a", "x.jsonl", LINES + "{broken\n")
    with pytest.raises(DataError, match=r"x\.jsonl:4 is not JSON"):
        shown(source)
