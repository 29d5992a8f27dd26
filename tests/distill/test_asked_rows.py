"""A prompt is asked with all that its row says, or it is skipped with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.small_engines import lively_chat_base

from medusa_kit.base.model import BaseModel
from medusa_kit.data.readers import AnswerRow, Conversation, read_rows
from medusa_kit.distill.generate import fetch_answers, generate_answers
from medusa_kit.settings.sampling import SamplingParams


@pytest.fixture
def base() -> BaseModel:
    return lively_chat_base()


def asked_in(path: Path, base: BaseModel) -> list[str]:
    rows = [row for row in read_rows(str(path)) if isinstance(row, AnswerRow)]
    return [base.tokenizer.decode(row.prompt_ids) for row in rows]


SHOWING = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.name }}"
    "{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
)


def test_a_prompt_is_asked_with_its_tools_and_names_or_not_at_all(
    base: BaseModel, tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "rain"}}]
    rows = [
        Conversation([{"role": "user", "content": "Q"}], 1, None, "p", tools=tools),
        Conversation([{"role": "user", "content": "Q", "name": "Ann"}], 2, None, "p"),
        Conversation([{"role": "user", "content": "Q"}], 3, None, "p", unused=("verdict",)),
        Conversation([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a",
                      "reasoning_content": "not asked", "weight": 0}], 4, None, "p"),
    ]  # fmt: skip
    report = generate_answers(base, rows, tmp_path / "plain.jsonl", max_new_tokens=2)
    assert [row for row, _ in report.skipped] == [1, 2]
    assert "does not show the row's tools" in report.skipped[0][1]
    assert "does not show 'name' of message 1" in report.skipped[1][1]
    assert (report.written, report.unused) == (2, {"verdict"})
    base.tokenizer.chat_template = SHOWING
    report = generate_answers(base, rows, tmp_path / "shown.jsonl", max_new_tokens=2)
    assert report.skipped == []
    said = "<|im_start|>Q<|im_end|>"
    assert asked_in(tmp_path / "shown.jsonl", base) == [
        json.dumps(tools) + said,
        "Ann" + said,
        said,
        said,
    ]


def test_a_server_is_not_asked_a_part_of_a_prompt(base: BaseModel, tmp_path: Path) -> None:
    base.tokenizer.chat_template = SHOWING
    tools = [{"type": "function", "function": {"name": "rain"}}]
    rows = [
        Conversation([{"role": "user", "content": "Q"}], 1, None, "p", tools=tools),
        Conversation([{"role": "user", "content": "Q", "name": "Ann"}], 2, None, "p"),
        Conversation([{"role": "user", "content": "Q"}], 3, None, "p"),
    ]
    sent: list[Any] = []

    def fetch(messages: list[Any]) -> tuple[list[int], str, bool]:
        sent.append(messages)
        return [1], "stop", False

    report = fetch_answers(
        base.tokenizer, rows, tmp_path / "a.jsonl", fetch, {}, sampling=SamplingParams()
    )
    assert [row for row, _ in report.skipped] == [1, 2]
    assert sent == [[{"role": "user", "content": "Q"}]]
