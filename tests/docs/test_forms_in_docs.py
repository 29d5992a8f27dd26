"""docs/data.md: every line that it shows is read (or refused) as it says; it shows every form."""

import re
from pathlib import Path
from typing import Any

import pytest

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.data.chat import encode_rows
from medusa_kit.data.readers import AnswerRow, BadRow, Conversation, read_good_and_bad, read_rows
from medusa_kit.data.row_forms import FORMS
from medusa_kit.data.row_keys import ANSWER_KEYS, CONTEXT_KEYS, PROMPT_KEYS, SYSTEM_KEYS, TURN_KEYS
from medusa_kit.data.sources import FILE_KINDS
from medusa_kit.distill.generate import asked_messages
from medusa_kit.errors import DataError
from medusa_kit.quick.prompts import read_prompts

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
SUFFIXES = {"json": ".jsonl", "text": ".txt", "csv": ".csv", "refused": ".jsonl"}


def blocks(section: str) -> list[tuple[str, str]]:
    """(file's suffix, content) of the examples of a section."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", SECTIONS[section], re.M | re.S)
    return [(SUFFIXES[kind], content) for kind, content in found]


def written(folder: Path, section: str) -> list[Path]:
    paths = []
    for number, (suffix, content) in enumerate(blocks(section)):
        paths.append(folder / f"{number}{suffix}")
        paths[-1].write_text(content)
    assert paths
    return paths


def rows_of(path: Path) -> list[Any]:
    rows = list(read_good_and_bad(str(path), extras=True))
    bad = [row.error() for row in rows if isinstance(row, BadRow)]
    assert not bad, bad
    header = 1 if path.suffix == ".csv" else 0
    assert len(rows) == len(path.read_text().splitlines()) - header
    return rows


def test_every_prompt_is_a_prompt(tmp_path: Path) -> None:
    for path in written(tmp_path, "Prompts"):
        for row in rows_of(path):
            assert isinstance(row, Conversation)
            assert not row.unused, row
            asked = asked_messages(row.messages, "first")
            assert "sky" in asked[-1]["content"] or "sunset" in asked[-1]["content"]


def test_quick_reads_all_the_prompts_together(tmp_path: Path) -> None:
    """With others around them, since quick needs eight that differ."""
    shown = written(tmp_path, "Prompts")[0].read_text()
    path = tmp_path / "together.jsonl"
    path.write_text(shown + "".join(f'"Question {number}?"\n' for number in range(20)))
    assert read_prompts(str(path)).skipped == 0


def test_every_answer_is_trained_on(tmp_path: Path) -> None:
    own, conversations = written(tmp_path, "Answers")
    assert all(isinstance(row, AnswerRow) for row in rows_of(own))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    for path in (own, conversations):
        rows = rows_of(path)
        examples, report = encode_rows(rows, tokenizer, 512, on_error="fail")
        assert len(examples) == len(rows)
        assert not any(count.unused for count in report.sources.values())


def test_what_is_said_to_be_refused_is_refused(tmp_path: Path) -> None:
    for path in written(tmp_path, "What is refused, and why"):
        rows = list(read_good_and_bad(str(path), extras=True))
        assert rows
        assert all(isinstance(row, BadRow) and row.hint for row in rows), rows


def test_the_page_has_every_form_and_every_kind_of_file() -> None:
    for section, keys in (("Prompts", (*PROMPT_KEYS, *CONTEXT_KEYS)), ("Answers", ANSWER_KEYS)):
        for key in keys:
            assert f'"{key}"' in SECTIONS[section], key
    examples = SECTIONS["Prompts"] + SECTIONS["Answers"]
    for key in (*TURN_KEYS, *SYSTEM_KEYS, "turns", "text", "history", "prompt_ids", "response_ids"):
        assert f'"{key}"' in examples, key
    for suffix in FILE_KINDS:
        assert f"`{suffix}`" in SECTIONS["Files and data sets"], suffix


def test_names_of_data_sets_are_read_as_the_page_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def load(name: str, config: str | None = None, *, split: str) -> list[Any]:
        calls.append((name, config, split))
        return [{"prompt": "a"}]

    monkeypatch.setattr("datasets.load_dataset", load)
    names = re.findall(r"`((?:OWNER/)?NAME[^`]*)`", SECTIONS["Files and data sets"])
    for name in names:
        list(read_rows(name.replace("NAME", "owner/name").replace("OWNER/owner", "owner")))
    assert calls == [
        ("owner/name", None, "train"),
        ("owner/name", None, "SPLIT"),
        ("owner/name", "CONFIG", "SPLIT"),
        ("owner/name", None, "test[:1000]"),
    ]


FILES: dict[str, bytes] = {
    "unknown.jsonl": b'{"goal": "x"}\n', "number.jsonl": b"3\n", "empty.jsonl": b"",
    "broken.jsonl": b'{"prompt": \n', "object.json": b'{\n"prompt": "x"\n}', "list.json": b"[\n{]",
    "picture.png": b"\x89PNG\xff\xfe", "page.md": b"# Title\n", "half.jsonl.gz": b"no gzip",
    "wide.csv": b"prompt\na,b\n", "role.jsonl": b'{"messages": [{"role": "user"}]}\n',
    "ids.jsonl": b'{"response_ids": "1"}\n',
}  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, "nowhere.jsonl", "./nowhere.jsnl", "/nowhere/at/all"])
def test_errors_about_data_point_at_the_page(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name) if name in FILES else name
    if name in FILES:
        Path(path).write_bytes(FILES[name])
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert "docs/data.md" in (caught.value.hint or "")


def test_a_name_that_is_neither_a_file_nor_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise FileNotFoundError("no such data set")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(DataError) as caught:
        list(read_rows("prompts.jsnl"))
    assert ".jsonl" in (caught.value.hint or "")
    assert "docs/data.md" in (caught.value.hint or "")


def test_a_hint_survives_where_rows_are_skipped(tmp_path: Path) -> None:
    """Quick, training and inspection skip bad rows; with none left the reason is the first's."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"goal": "x"}\n')
    with pytest.raises(DataError, match="'goal'") as caught:
        read_prompts(str(path))
    assert FORMS in (caught.value.hint or "")
    with pytest.raises(DataError, match="'goal'") as caught:
        encode_rows(read_good_and_bad(str(path)), byte_tokenizer(), 64)
    assert FORMS in (caught.value.hint or "")
