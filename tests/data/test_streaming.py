"""Data sets read row by row: the same rows, and no more of them than are needed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from medusa_kit.data.readers import read_rows
from medusa_kit.errors import ConfigError, DataError

PARTS = ["train-00000-of-00002", "train-00001-of-00002"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def conversations(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": str(number),
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": f"answer {number}"},
            ],
        }
        for number in range(first, first + count)
    ]


def write(folder: Path, kind: str, part: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{part}.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_streamed_rows_are_the_same(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "set"
    for number, part in enumerate(PARTS):
        write(folder, kind, part, conversations(4 * number, 4))
    whole = list(read_rows(str(folder)))
    assert [row.id for row in whole] == [str(number) for number in range(8)]
    for limit in (1, 4, 6, 8, 100):
        assert list(read_rows(str(folder), limit, streaming=True)) == whole[:limit]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_after_the_limit_are_not_opened(tmp_path: Path, kind: str) -> None:
    """The second file is broken, which reading it would show."""
    folder = tmp_path / "set"
    write(folder, kind, PARTS[0], conversations(0, 4))
    write(folder, kind, PARTS[1], conversations(4, 4)).write_bytes(b"\xff{broken")
    assert [row.row for row in read_rows(str(folder), 4, streaming=True)] == [1, 2, 3, 4]
    reason = "cannot load the data set" if kind == "parquet" else "00001-of-00002.jsonl is not UTF"
    for limit, streaming in ((4 + (kind == "jsonl"), False), (5, True)):
        with pytest.raises(DataError, match=reason):
            list(read_rows(str(folder), limit, streaming=streaming))


def test_rows_after_the_limit_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = [], []

    def rows() -> Iterator[dict[str, Any]]:
        for row in conversations(0, 1000):
            made.append(row["id"])
            yield row

    def load(name: str, config: str | None = None, **options: Any) -> Any:
        calls.append(options)
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr("datasets.load_dataset", load)
    assert len(list(read_rows("owner/name:test", 7, streaming=True))) == 7
    assert calls == [{"split": "test", "streaming": True}]
    assert made == [str(number) for number in range(7)]


def test_a_stream_without_a_limit_is_refused_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("was opened"))
    with pytest.raises(ConfigError, match="'owner/name' is streamed without a limit") as caught:
        list(read_rows("owner/name", streaming=True))
    assert "data.limit" in (caught.value.hint or "")
    path = write(tmp_path / "files", "jsonl", "rows", conversations(0, 3))
    assert len(list(read_rows(str(path), streaming=True))) == 3, "a file has an end"


def test_a_stream_that_breaks_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield conversations(0, 1)[0]
        raise ConnectionError("the line went dead")

    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: broken())
    with pytest.raises(DataError, match="'owner/name': the line went dead"):
        list(read_rows("owner/name", 5, streaming=True))
