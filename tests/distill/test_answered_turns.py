"""Which turn of a conversation is answered."""

from pathlib import Path

import pytest

from medusa_kit.base.model import BaseModel
from medusa_kit.data.readers import AnswerRow, Conversation, read_rows
from medusa_kit.distill.generate import asked_messages, generate_answers
from medusa_kit.errors import ConfigError, DataError


def test_which_turn_is_answered() -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert asked_messages(messages, "first") == messages[:2]
    assert asked_messages(messages, "last") == messages[:4]
    with pytest.raises(ConfigError, match="turns 'all' is unknown"):
        asked_messages(messages, "all")
    with pytest.raises(DataError, match="no user turn"):
        asked_messages(messages[:1], "first")


def test_the_last_turn_in_a_file(chat_base: BaseModel, tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = [Conversation(messages, 1, None, "p.jsonl")]
    generate_answers(chat_base, rows, tmp_path / "a.jsonl", max_new_tokens=2, turns="last")
    (answer,) = read_rows(str(tmp_path / "a.jsonl"))
    assert isinstance(answer, AnswerRow)
    assert chat_base.tokenizer.decode(answer.prompt_ids) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
