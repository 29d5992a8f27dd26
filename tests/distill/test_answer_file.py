"""A file of answers goes on by what was asked, not by the names of rows alone."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.data.answer_settings import base_that_answered
from medusa_kit.data.chat import encode_prompt
from medusa_kit.data.readers import AnswerRow, Conversation, read_rows
from medusa_kit.distill.generate import generate_answers
from medusa_kit.errors import ConfigError, DataError

TOKENS = 2


@pytest.fixture
def base() -> BaseModel:
    return load_base_model("debug-tiny", device="cpu")


def prompt(text: str, row: int, identity: str | None = None) -> Conversation:
    return Conversation([{"role": "user", "content": text}], row, identity, "prompts.jsonl")


def prompts(count: int) -> list[Conversation]:
    return [prompt(f"question {row}", row) for row in range(1, count + 1)]


def rows_of(path: Path) -> list[AnswerRow]:
    return list(read_rows(str(path)))  # type: ignore[arg-type]


def test_a_prompt_that_changed_under_its_name_is_answered_anew(
    base: BaseModel, tmp_path: Path
) -> None:
    out, options = tmp_path / "answers.jsonl", {"max_new_tokens": TOKENS}
    generate_answers(base, [prompt("tree", 1), prompt("a", 2, "named")], out, **options)
    before = out.read_text()
    edited = [prompt("bush", 1), prompt("b", 2, "named"), prompt("new", 3)]
    report = generate_answers(base, edited, out, **options)
    assert (report.written, report.already_there) == (3, 0)
    assert report.changed == 2
    assert (tmp_path / "answers.jsonl.earlier").read_text() == before
    rows = rows_of(out)
    assert sorted(row.id or "" for row in rows) == ["named", "prompts:1", "prompts:3"]
    assert {tuple(row.prompt_ids) for row in rows} == {
        tuple(encode_prompt(base.tokenizer, one.messages)) for one in edited
    }
    report = generate_answers(base, edited, out, **options)
    assert (report.written, report.already_there) == (0, 3)
    assert report.changed == 0
    assert generate_answers(base, [prompt("tree", 1)], out, **options).already_there == 1


def test_answers_of_an_older_version_count_where_the_same_is_asked(
    base: BaseModel, tmp_path: Path
) -> None:
    """Their rows have no digest, but the prompt's token ids."""
    out, options = tmp_path / "answers.jsonl", {"max_new_tokens": TOKENS}
    generate_answers(base, prompts(3), out, **options)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        row.pop("asked", None)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    edited = [*prompts(2), prompt("edited", 3), prompt("new", 4)]
    report = generate_answers(base, edited, out, **options)
    assert (report.written, report.already_there) == (2, 2)
    assert report.changed == 1


def test_a_template_that_writes_the_time_asks_nothing_twice(
    base: BaseModel, tmp_path: Path
) -> None:
    """Each rendering differs, as the next day's does where templates write the date."""
    base.tokenizer.chat_template = "{{ strftime_now('%H%M%S%f') }}" + base.tokenizer.chat_template
    out, options = tmp_path / "answers.jsonl", {"max_new_tokens": TOKENS}
    generate_answers(base, prompts(2), out, **options)
    report = generate_answers(base, prompts(2), out, **options)
    assert (report.written, report.already_there) == (0, 2)
    base.tokenizer.chat_template += "!"
    assert generate_answers(base, prompts(2), out, **options).written == 2


def test_a_second_run_into_the_same_file_is_refused(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own name and by a link to it; the file is the same as of one run."""
    monkeypatch.setattr("medusa_kit.process_lock.PATIENCE", 0, raising=False)
    out, link = tmp_path / "answers.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(out)
    refused: list[str] = []

    def rows() -> Iterator[Conversation]:
        for path in (out, link):
            with pytest.raises(ConfigError, match="another run") as caught:
                generate_answers(base, prompts(3), path, max_new_tokens=TOKENS)
            refused.append(caught.value.message)
        yield from prompts(3)

    generate_answers(base, rows(), out, max_new_tokens=TOKENS)
    assert [f"process {os.getpid()} on " in message for message in refused] == [True, True]
    assert [row.id for row in rows_of(out)] == ["prompts:1", "prompts:2", "prompts:3"]
    assert generate_answers(base, prompts(3), out, max_new_tokens=TOKENS).already_there == 3


def test_a_run_that_answers_nothing_leaves_nothing(base: BaseModel, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompt is left"):
        generate_answers(base, [], tmp_path / "answers.jsonl", max_new_tokens=TOKENS)
    assert list(tmp_path.iterdir()) == []


def renamed(rows: list[Conversation], source: str = "prompts.jsonl") -> list[Conversation]:
    """The same prompts at other places, or in another file."""
    return [replace(row, row=number, source=source) for number, row in enumerate(rows, start=1)]


@pytest.mark.parametrize("change", ["inserted", "deleted", "reversed", "renamed"])
def test_prompts_without_ids_are_known_by_what_they_ask(
    base: BaseModel, tmp_path: Path, change: str
) -> None:
    out, options = tmp_path / "answers.jsonl", {"max_new_tokens": TOKENS}
    generate_answers(base, prompts(5), out, **options)
    moved = {
        "inserted": renamed([prompt("new", 1), *prompts(5)]),
        "deleted": renamed(prompts(5)[1:]),
        "reversed": renamed(prompts(5)[::-1]),
        "renamed": renamed(prompts(5), "others.jsonl"),
    }[change]
    report = generate_answers(base, moved, out, **options)
    new = int(change == "inserted")
    assert (report.written, report.already_there, report.changed) == (new, len(moved) - new, 0)
    rows = rows_of(out)
    asked = {tuple(row.prompt_ids) for row in rows}
    assert len(asked) == len({row.id for row in rows}) == len(moved)
    assert generate_answers(base, moved, out, **options).written == 0


def test_prompts_without_ids_that_ask_the_same_have_an_answer_each(
    base: BaseModel, tmp_path: Path
) -> None:
    out, options = tmp_path / "answers.jsonl", {"max_new_tokens": TOKENS}
    same = [prompt("same", row) for row in (1, 2, 3)]
    generate_answers(base, same[:2], out, **options)
    report = generate_answers(base, renamed(same, "others.jsonl"), out, **options)
    assert (report.written, report.already_there) == (1, 2)
    assert len({row.id for row in rows_of(out)}) == 3


def test_ids_that_clash_with_made_ones(base: BaseModel, tmp_path: Path) -> None:
    out, options = tmp_path / "answers.jsonl", {"max_new_tokens": TOKENS}
    rows = [prompt("one", 1, "a#3"), prompt("two", 2, "a"), prompt("three", 3, "a")]
    generate_answers(base, rows, out, **options)
    assert len({row.id for row in rows_of(out)}) == 3
    assert generate_answers(base, rows, out, **options).written == 0
    moved = renamed([prompt("new", 1), *rows])
    assert generate_answers(base, moved, out, **options).written == 1


def test_a_link_and_its_target_have_the_same_settings(base: BaseModel, tmp_path: Path) -> None:
    out, link = tmp_path / "disk/answers.jsonl", tmp_path / "link.jsonl"
    out.parent.mkdir()
    link.symlink_to(out)
    generate_answers(base, prompts(1), link, max_new_tokens=TOKENS)
    meta = out.with_name("answers.jsonl.meta.json")
    assert meta.is_file()
    for path, count in ((out, 2), (link, 3)):
        assert generate_answers(base, prompts(count), path, max_new_tokens=TOKENS).written == 1
        with pytest.raises(ConfigError, match="other settings"):
            generate_answers(base, prompts(4), path, max_new_tokens=TOKENS + 1)
        assert base_that_answered(str(path)) == base.info.fingerprint
    meta.rename(tmp_path / "link.jsonl.meta.json")  # where earlier versions wrote it
    assert generate_answers(base, prompts(4), link, max_new_tokens=TOKENS).written == 1


def test_a_file_holds_the_answers_to_the_prompts_of_its_run_alone(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other prompts' answers lie beside it, and none is lost or made twice."""
    out = tmp_path / "answers.jsonl"
    some = [prompt(f"some {row}", row) for row in range(1, 5)]
    others = renamed([prompt(f"other {row}", row) for row in range(1, 4)], "others.jsonl")

    def made(rows: list[Conversation]) -> tuple[int, int]:
        report = generate_answers(base, rows, out, max_new_tokens=TOKENS)
        asked = [tuple(encode_prompt(base.tokenizer, row.messages)) for row in rows]
        assert [tuple(row.prompt_ids) for row in rows_of(out)] == asked
        return report.written, report.already_there

    assert made(some) == (4, 0)
    assert made(others) == (3, 0)
    assert "held 4 answers to other prompts" in " ".join(capsys.readouterr().err.split())
    assert made(some) == (0, 4)
    assert made(others) == (0, 3)
    assert made(others[:2]) == (0, 2)
    assert made([*others, *some[:1]]) == (0, 4)
    earlier = [path.name for path in tmp_path.glob("*.earlier*")]
    assert len(earlier) == 4, earlier  # two files and their settings, however often they change
