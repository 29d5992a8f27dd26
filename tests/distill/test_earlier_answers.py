"""Answers to prompts that were tokenized differently are kept where the tokens are the same,
answered again where they are not, and never lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.text.other_encodings import base_that_reads

from medusa_kit.base.model import BaseModel
from medusa_kit.data.chat import encode_prompt
from medusa_kit.data.readers import Conversation
from medusa_kit.distill.generate import fetch_answers, generate_answers
from medusa_kit.errors import ConfigError
from medusa_kit.settings.sampling import SamplingParams

WITH_DIGITS, WITHOUT = ["count 123", "add 12 and 12"], ["hello", "say a word", "go on"]
TEXTS = [WITHOUT[0], WITH_DIGITS[0], WITHOUT[1], WITH_DIGITS[1], WITHOUT[2]]


@pytest.fixture(scope="module")
def then() -> BaseModel:
    return base_that_reads(single_digits=False)


@pytest.fixture(scope="module")
def now() -> BaseModel:
    return base_that_reads(single_digits=True)


def prompts(texts: list[str]) -> list[Conversation]:
    return [
        Conversation([{"role": "user", "content": text}], row, None, "p.jsonl")
        for row, text in enumerate(texts, start=1)
    ]


def answer(base: BaseModel, path: Path, texts: list[str] = TEXTS, tokens: int = 2) -> Any:
    return generate_answers(base, prompts(texts), path, max_new_tokens=tokens)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings_of(path: Path) -> dict[str, Any]:
    return json.loads(path.with_name(path.name + ".meta.json").read_text())


def forget_encoding(path: Path) -> None:
    """As older versions left it."""
    found = settings_of(path)
    del found["encoding"]
    path.with_name(path.name + ".meta.json").write_text(json.dumps(found))


@pytest.mark.parametrize("known", [True, False])
def test_only_prompts_with_other_tokens_are_answered_again(
    then: BaseModel, now: BaseModel, tmp_path: Path, known: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path, fresh = tmp_path / "a.jsonl", tmp_path / "fresh.jsonl"
    answer(then, path)
    if not known:
        forget_encoding(path)
    before = path.read_text()
    report = answer(now, path)
    assert (report.written, report.already_there, report.changed) == (2, 3, 0)
    answer(now, fresh)
    by_id = {row["id"]: row for row in rows(path)}
    assert [by_id[row["id"]] for row in rows(fresh)] == rows(fresh)
    assert len(rows(path)) == 5
    assert settings_of(path) == settings_of(fresh)
    assert settings_of(path)["encoding"] == now.encoding
    assert (tmp_path / "a.jsonl.earlier").read_text() == before
    assert "3 of its answers serve" in capsys.readouterr().err
    assert answer(now, path).already_there == 5


def test_a_file_whose_answers_all_serve_leaves_nothing_beside_it(
    then: BaseModel, now: BaseModel, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    answer(then, path, WITHOUT)
    before = rows(path)
    assert answer(now, path, WITHOUT).already_there == 3
    assert rows(path) == before
    names = sorted(one.name for one in tmp_path.iterdir() if not one.name.startswith("."))
    assert names == ["a.jsonl", "a.jsonl.meta.json"]


def test_what_a_run_does_not_ask_serves_a_later_one(
    then: BaseModel, now: BaseModel, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    answer(then, path)
    assert answer(now, path, TEXTS[:1]).already_there == 1
    assert len(rows(path)) == 1
    report = answer(now, path)
    assert (report.written, report.already_there) == (2, 3)
    assert len(rows(path)) == 5


def test_back_and_forth_nothing_is_lost_or_answered_twice(
    then: BaseModel, now: BaseModel, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    first = answer(then, path).written + answer(now, path).written
    assert first == 7
    report = answer(then, path)
    assert (report.written, report.already_there) == (0, 5)
    assert (tmp_path / "a.jsonl.earlier-2").is_file()
    with pytest.raises(ConfigError, match="other settings"):
        answer(now, path, tokens=3)
    path.unlink()
    assert answer(now, path, tokens=3).already_there == 0  # earlier answers are of two tokens


def test_through_a_link(then: BaseModel, now: BaseModel, tmp_path: Path) -> None:
    path, link = tmp_path / "disk" / "a.jsonl", tmp_path / "a.jsonl"
    path.parent.mkdir()
    link.symlink_to(path)
    answer(then, link)
    answer(now, link)
    assert link.is_symlink()
    assert len(rows(path)) == 5
    assert len(rows(path.with_name("a.jsonl.earlier"))) == 5


def test_an_answer_that_would_end_elsewhere_does_not_serve(
    now: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    answer(now, path, tokens=6)
    ids = rows(path)[0]["response_ids"]
    assert len(ids) == 6
    monkeypatch.setattr(now.generation_config, "eos_token_id", [ids[0]])
    assert answer(now, path, tokens=6).written >= 1
    (row,) = [row for row in rows(path) if row["id"] == "p:1"]
    assert (row["response_ids"], row["finish_reason"]) == (ids[:1], "stop")


def test_a_template_that_changed_asks_other_tokens(now: BaseModel, tmp_path: Path) -> None:
    base = base_that_reads(single_digits=True)
    path = tmp_path / "a.jsonl"
    answer(now, path)
    base.tokenizer.chat_template = "Be brief." + base.tokenizer.chat_template
    assert answer(base, path).written == 5
    assert [row["prompt_ids"] for row in rows(path)] == [
        encode_prompt(base.tokenizer, one.messages) for one in prompts(TEXTS)
    ]


def test_answers_of_a_server(then: BaseModel, now: BaseModel, tmp_path: Path) -> None:
    """Their prompts, and often the answers, are encoded here."""
    path, asked = tmp_path / "a.jsonl", []

    def fetch(messages: list[dict[str, str]]) -> tuple[list[int], str, bool]:
        asked.append(messages[0]["content"])
        return [1, 2], "stop", False

    for base, count in ((then, 5), (now, 2), (now, 0)):
        asked.clear()
        fetch_answers(
            base.tokenizer, prompts(TEXTS), path, fetch, {"endpoint_model": "m"},
            sampling=SamplingParams(), concurrency=1,
        )  # fmt: skip
        assert len(asked) == count
        assert base is then or set(asked) <= set(WITH_DIGITS)
