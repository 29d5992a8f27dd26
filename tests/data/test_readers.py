"""Every row format, and errors that name the file and the line."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.data.chat import encode_rows
from medusa_kit.data.mix import recipe_rows
from medusa_kit.data.readers import AnswerRow, Conversation, read_rows
from medusa_kit.errors import DataError
from medusa_kit.settings.recipe import DataSection


def lines(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def messages_of(source: str, limit: int | None = None) -> list[list[tuple[str, str]]]:
    rows = list(read_rows(source, limit))
    assert all(isinstance(row, Conversation) for row in rows)
    return [[(m["role"], m["content"]) for m in row.messages] for row in rows]  # type: ignore


def test_every_conversation_format(tmp_path: Path) -> None:
    source = lines(
        tmp_path / "mixed.jsonl",
        [
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                               {"from": "gpt", "value": "a"}], "id": "share-1"},
            {"messages": [{"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"},
                          {"role": "tool", "content": "t"}]},
            {"prompt": "alone", "id": 7},
            {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
            {"turns": [{"content": "Write a poem."}], "cluster": "x"},
            {"turns": [{"content": [{"type": "text", "text": "Write "}, {"text": "two."}]}, "No"]},
            {"turns": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
            "just text",
            {"messages": None, "prompt": "columns of a data set are filled up with nothing"},
        ],
    )  # fmt: skip
    assert messages_of(source) == [
        [("system", "s"), ("user", "q"), ("assistant", "a")],
        [("user", "q2"), ("assistant", "a2"), ("tool", "t")],
        [("user", "alone")],
        [("user", "first")],
        [("user", "Write a poem.")],
        [("user", "Write two.")],
        [("user", "Hi"), ("assistant", "Yo")],
        [("user", "just text")],
        [("user", "columns of a data set are filled up with nothing")],
    ]
    rows = list(read_rows(source))
    assert [row.id for row in rows] == ["share-1", None, "7", "81", *[None] * 5]
    assert [row.row for row in rows] == list(range(1, 10))
    assert all(isinstance(row, Conversation) and row.source == source for row in rows)


def test_answer_rows(tmp_path: Path) -> None:
    sampling = {"temperature": 0.7, "seed": 3}
    source = lines(
        tmp_path / "answers.jsonl",
        [
            {"id": "a", "prompt_ids": [1, 2], "response_ids": [3, 0], "finish_reason": "stop",
             "sampling": sampling},
            {"prompt_ids": [], "response_ids": [], "finish_reason": "length"},
        ],
    )  # fmt: skip
    assert list(read_rows(source)) == [
        AnswerRow([1, 2], [3, 0], "stop", "a", 1, sampling),
        AnswerRow([], [], "length", None, 2, None),
    ]
    assert [row.source for row in read_rows(source)] == [source, source]


def test_plain_text_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two words \n", encoding="utf-8")
    rows = list(read_rows(str(path)))
    assert messages_of(str(path)) == [[("user", "one")], [("user", "two words")]]
    assert [row.row for row in rows] == [1, 3], "rows are numbered as an editor numbers lines"


def test_a_json_list_and_blank_lines_in_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a"}, "b"], indent=2))
    assert messages_of(str(path)) == [[("user", "a")], [("user", "b")]]
    gappy = tmp_path / "rows.jsonl"
    gappy.write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [row.row for row in read_rows(str(gappy))] == [2, 4]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, text in (("a.txt", "héllo\n"), ("a.jsonl", '"héllo"\n'), ("a.json", '["héllo"]')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert messages_of(str(tmp_path / name)) == [[("user", "héllo")]]


def test_limit(tmp_path: Path) -> None:
    source = lines(tmp_path / "p.jsonl", [{"prompt": str(i)} for i in range(5)])
    assert len(list(read_rows(source, limit=2))) == 2
    assert len(list(read_rows(source, limit=9))) == 5


def test_rows_after_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{broken\n')
    assert len(list(read_rows(str(path), limit=2))) == 2


TURN = {"role": "user", "content": "x"}
ANSWER = {"prompt_ids": [1], "response_ids": [2], "finish_reason": "stop"}
BAD_ROWS: dict[str, tuple[Any, str]] = {
    "no known key": ({"goal": "x", "way": "y"}, "format is unknown.*'goal', 'way'"),
    "no key": ({}, "the row is empty"),
    "a number": (3, "holds a number, expected an object"),
    "a null": (None, "holds null"),
    "unknown role": ({"messages": [{"role": "narrator", "content": "x"}]}, "role 'narrator'"),
    "a list for a role": ({"messages": [{"role": ["user"], "content": "x"}]}, "role "),
    "no content": ({"messages": [{"role": "user"}]}, "lacks 'role' or 'content'"),
    "no value": ({"conversations": [{"from": "human"}]}, "lacks 'from' or 'value'"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
                  "content has a part of type 'image'"),
    "a part of text": ({"messages": [{"role": "user", "content": ["x"]}]}, "a part that is text"),
    "no content text": ({"messages": [{"role": "user", "content": None}]}, "is null"),
    "a turn of text": ({"messages": ["x"]}, "lacks 'role'"),
    "messages of text": ({"messages": "x"}, "messages"),
    "messages a number": ({"messages": 3}, "messages"),
    "turns of text": ({"turns": "abc"}, "turns"),
    "turns an object": ({"turns": {"a": 1}}, "turns"),
    "turns of nulls": ({"turns": [None]}, "turn 1 is null, expected text or an object"),
    "turns of numbers": ({"turns": ["x", 5]}, "turn 2 is a number, expected text or an object"),
    "turns of truth": ({"turns": [False]}, "turn 1 is a boolean, expected text or an object"),
    "turns of lists": ({"turns": [["Hi", "Yo"]]}, "turn 1 is a list, expected text or an object"),
    "a turn without content": ({"turns": [{"text": "x"}]}, "turn 1 is an object without content"),
    "a turn whose content is null": ({"turns": [{"content": None}]}, "content is null, expected"),
    "a turn with more": ({"turns": [{"content": "x", "image": "y"}]}, "a message has 'image'"),
    "a turn with a role among others": ({"turns": [TURN, "x"]}, "a message has 'role'"),
    "a part that is null": ({"turns": [{"content": [None]}]}, "a part that is null"),
    "a part with a number": ({"turns": [{"content": [{"text": 5}]}]}, "part is a number"),
    "a text that is a number": ({"text": 5}, "text is a number, expected text"),
    "long integers in arguments": (
        {"messages": [TURN, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": '{"a": ' + "9" * 5000 + "}"}}]}]},
        "tool_calls holds no call: .*5,000 digits"),
    "long integers in tools": ({"prompt": "x", "tools": "[" + "9" * 5000 + "]"}, "5,000 digits"),
    "a prompt of parts": ({"prompt": ["x"]}, "a turn lacks 'role'"),
    "a prompt that is a number": ({"prompt": 3}, "prompt is a number, expected text or messages"),
    "ids as text": ({**ANSWER, "response_ids": "1 2"}, "response_ids must be a list of token ids"),
    "negative ids": ({**ANSWER, "response_ids": [-1]}, "response_ids must be"),
    "truth as an id": ({**ANSWER, "response_ids": [True]}, "response_ids must be"),
    "fractions as ids": ({**ANSWER, "prompt_ids": [1.0]}, "prompt_ids must be"),
    "no prompt ids": ({"response_ids": [1], "finish_reason": "stop"}, "prompt_ids must be"),
    "unknown reason": ({**ANSWER, "finish_reason": "error"}, "finish_reason is 'error'"),
    "no reason": ({"prompt_ids": [1], "response_ids": [2]}, "finish_reason is None"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, case: str) -> None:
    row, message = BAD_ROWS[case]
    source = lines(tmp_path / "rows.jsonl", [{"messages": [TURN]}, row])
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(source))
    assert f"{source}:2" in caught.value.message


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_skipped_with_its_reason_where_bad_rows_are(tmp_path: Path, case: str) -> None:
    row, message = BAD_ROWS[case]
    source = lines(tmp_path / "rows.jsonl", [ANSWER, row, ANSWER])
    examples, report = encode_rows(recipe_rows(sources_of(source), 0), byte_tokenizer(), 64)
    assert [example.row for example in examples] == [1, 3]
    ((number, reason),) = report.skipped
    assert number == 2
    assert re.search(message, reason)
    with pytest.raises(DataError, match=message):
        encode_rows(recipe_rows(sources_of(source), 0), byte_tokenizer(), 64, "fail")


def sources_of(source: str) -> DataSection:
    return DataSection(sources=[source])


def test_broken_json_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:3 is not JSON"):
        list(read_rows(str(path)))
    path = tmp_path / "rows.json"
    path.write_text('[\n {"prompt": "a"},\n {"prompt"\n]')
    with pytest.raises(DataError, match=r"rows\.json:4 is not JSON"):
        list(read_rows(str(path)))


def test_a_json_file_that_is_no_list(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{\n "prompt": "a"\n}')
    with pytest.raises(DataError, match="holds an object, expected a list"):
        list(read_rows(str(path)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.json"])
def test_text_that_is_not_utf8(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes('["caf\u00e9"]'.encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        list(read_rows(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", ""), ("b.jsonl", "\n\n"), ("c.txt", "\n"), ("d.json", "[]")]
)
def test_empty_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="holds no row"):
        list(read_rows(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "/nowhere/at/all"])
def test_missing_files(name: str) -> None:
    with pytest.raises(DataError, match="no data file at"):
        list(read_rows(name))


# Data sets by name.


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ultrachat", ("ultrachat", None, "train")),
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:test[:10]", ("owner/name", None, "test[:10]")),
        ("owner/name/config", ("owner/name", "config", "train")),
        ("owner/name/config:validation", ("owner/name", "config", "validation")),
    ],
)
def test_names_of_data_sets(
    monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[str, str | None, str]
) -> None:
    calls = []

    def load(name: str, config: str | None = None, *, split: str) -> list[Any]:
        calls.append((name, config, split))
        return [{"prompt": "a"}, {"turns": ["b"]}]

    monkeypatch.setattr("datasets.load_dataset", load)
    assert messages_of(source) == [[("user", "a")], [("user", "b")]]
    assert calls == [expected]


def test_a_local_folder_is_never_split_into_owner_name_and_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load(name: str, config: str | None = None, *, split: str) -> list[Any]:
        calls.append((name, config, split))
        return [{"prompt": "a"}]

    (tmp_path / "some/data/set").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", load)
    for source in ("some/data/set", "./some/data", "some/data:test"):
        list(read_rows(source))
    assert calls == [("some/data/set", None, "train"), ("./some/data", None, "train"),
                     ("some/data", None, "test")]  # fmt: skip


def test_a_folder_of_json_files_through_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    lines(folder / "train.jsonl", [{"messages": [TURN]}, {"messages": [TURN, TURN]}])
    assert messages_of(str(folder)) == [[("user", "x")], [("user", "x"), ("user", "x")]]


def test_a_data_set_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(DataError, match="cannot load the data set 'owner/name': no network"):
        list(read_rows("owner/name"))


def test_without_the_package_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="needs the package datasets") as caught:
        list(read_rows("owner/name"))
    assert "pip install" in (caught.value.hint or "")


@pytest.mark.parametrize("tools", ["[]", "null", "{}", " ", "", None, []])
def test_a_row_may_say_that_it_has_no_tools(tmp_path: Path, tools: Any) -> None:
    """Many data sets have tools as JSON text, "[]" where there are none."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}], "tools": tools}))
    (row,) = read_rows(str(path))
    assert isinstance(row, Conversation)
    assert row.tools is None
