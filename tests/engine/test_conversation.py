"""Conversations from Python: later turns are read once, and say what transformers would."""

from typing import Any

import pytest
import torch
from support.debug_model import NO_SYSTEM
from support.small_engines import engine_with_heads, lively_chat_base

from medusa_kit.base.model_state import watch_of
from medusa_kit.engine.conversation import Conversation
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, ContextLengthError, DataError
from medusa_kit.infer.cpu.verifier import NativeVerifier

QUESTIONS = ("Tell me about rivers.", "And about hills?", "Why?")


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Its answers are bytes of no text, so that encoding one again gives other tokens."""
    return engine_with_heads(lively_chat_base())


def plain(engine: Engine, ids: list[int], tokens: int) -> list[int]:
    with torch.no_grad():
        out_1T = engine.base.model.generate(
            torch.tensor([ids]), max_new_tokens=tokens, do_sample=False,
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        )  # fmt: skip
    return out_1T[0, len(ids) :].tolist()


def keeps(engine: Engine) -> bool:
    """Whether what a call has read is there for the next: where steps run in C++."""
    return isinstance(engine.verifier, NativeVerifier)


def contents(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages]


@pytest.mark.parametrize("drafter", ["none", "medusa", "auto"])
def test_each_turn_reads_its_new_message_alone(engine: Engine, drafter: str) -> None:
    conversation, before = engine.conversation(system=f"With {drafter}."), list[int]()
    for turn, question in enumerate(QUESTIONS):
        result = conversation.send(question, max_new_tokens=20, drafter=drafter)
        asked = conversation.prompt_ids
        assert result.token_ids == plain(engine, asked, 20)
        assert asked[: len(before)] == before
        assert (asked == engine.encode(conversation.messages[:-1])) == (turn == 0)
        if turn:  # the answer's last token has been read only where it was the middle of a path
            assert result.stats.cached_tokens in [keeps(engine) * (len(before) - n) for n in (0, 1)]
        before = [*asked, *result.token_ids]
    assert [message["role"] for message in conversation.messages] == [
        "system", *["user", "assistant"] * 3,
    ]  # fmt: skip
    assert not conversation.rewritten


def test_an_answer_that_was_cut_ends_as_the_template_ends_one(engine: Engine) -> None:
    conversation = engine.conversation()
    first = conversation.send(QUESTIONS[0], max_new_tokens=3)
    asked = conversation.prompt_ids
    assert first.finish_reason == "length"
    conversation.send(QUESTIONS[1], max_new_tokens=3)
    added = engine.base.tokenizer.decode(conversation.prompt_ids[len(asked) + 3 :])
    assert added == (
        f"<|im_end|>\n<|im_start|>user\n{QUESTIONS[1]}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_ended_by_itself_is_not_ended_twice(engine: Engine) -> None:
    config, end = engine.base.model.generation_config, engine.base.tokenizer.eos_token_id
    conversation = engine.conversation()
    said = conversation.send(QUESTIONS[0], max_new_tokens=6, logit_bias={end: 100})
    assert (said.token_ids, said.finish_reason) == ([end], "stop")
    asked = conversation.prompt_ids
    conversation.send(QUESTIONS[1], max_new_tokens=2)
    assert conversation.prompt_ids[: len(asked) + 1] == [*asked, end]
    assert conversation.prompt_ids.count(end) == 3
    other = said.token_ids[0] - 1  # a stop token that the template does not write
    before, config.eos_token_id = config.eos_token_id, [end, other]
    try:
        conversation = engine.conversation()
        said = conversation.send(QUESTIONS[0], max_new_tokens=6, logit_bias={other: 100})
        assert said.token_ids == [other]
        conversation.send(QUESTIONS[1], max_new_tokens=2)
    finally:
        config.eos_token_id = before
    assert conversation.prompt_ids[: len(asked) + 1] == [*asked, end]


def test_a_stop_string_is_left_out(engine: Engine) -> None:
    free = engine.conversation().send(QUESTIONS[0], max_new_tokens=30)
    place, stop = next(
        (n, c) for n, c in enumerate(free.text) if n > 3 and c.isascii() and c not in free.text[:n]
    )
    conversation = engine.conversation()
    cut = conversation.send(QUESTIONS[0], max_new_tokens=30, stop=stop)
    asked = conversation.prompt_ids
    assert cut.text == free.text[:place]
    result = conversation.send(QUESTIONS[1], max_new_tokens=5)
    kept = len(cut.token_ids) - 1
    added = conversation.prompt_ids[len(asked) :]
    assert added[:kept] == free.token_ids[:kept]
    assert added[kept] == engine.base.tokenizer.eos_token_id
    assert result.stats.cached_tokens == keeps(engine) * (len(asked) + kept)


@pytest.mark.parametrize("handed_out", [False, True])
def test_streams_are_kept_as_far_as_they_were_read(
    engine: Engine, handed_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stream that was left has read is kept too, unless others may write to the model."""
    monkeypatch.setattr(watch_of(engine.base.model), "is_handed_out", handed_out)
    conversation = engine.conversation()
    whole = conversation.stream(QUESTIONS[0], max_new_tokens=12)
    assert contents(conversation) == []
    text = "".join(whole)
    assert contents(conversation) == [QUESTIONS[0], text]
    first_turn = [*conversation.prompt_ids, *whole.result.token_ids]
    cut = conversation.stream(QUESTIONS[1], max_new_tokens=60)
    next(cut)
    asked, so_far = conversation.prompt_ids, cut.result
    assert len(conversation.messages) == 2  # it may go on
    assert 0 < len(so_far.token_ids) < 60
    result = conversation.send(QUESTIONS[2], max_new_tokens=5)
    assert list(cut) == []
    assert contents(conversation)[2:4] == [QUESTIONS[1], so_far.text]
    so_far_ids = [*asked, *so_far.token_ids]
    assert conversation.prompt_ids[: len(so_far_ids)] == so_far_ids
    kept = first_turn if handed_out else so_far_ids
    read = [keeps(engine) * (len(kept) - n) for n in (0, 1)]
    assert result.stats.cached_tokens in read
    assert result.token_ids == plain(engine, conversation.prompt_ids, 5)


def test_what_cannot_be_answered_is_left_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = engine.conversation()
    conversation.send(QUESTIONS[0], max_new_tokens=4)
    before = contents(conversation)
    with pytest.raises(ContextLengthError):
        conversation.send("x" * 1100, max_new_tokens=4)
    with pytest.raises(ConfigError, match="message \\['Why\\?'\\] is of type list"):
        conversation.send(["Why?"], max_new_tokens=4)  # type: ignore[arg-type]
    failing = conversation.stream(QUESTIONS[1], max_new_tokens=60)
    next(failing)
    with monkeypatch.context() as patch:
        patch.setattr(engine.verifier, "score", _fails)
        with pytest.raises(DataError):
            list(failing)
    assert contents(conversation) == before
    asked = conversation.prompt_ids
    conversation.send(QUESTIONS[2], max_new_tokens=4)
    assert contents(conversation)[:3] == [*before, QUESTIONS[2]]
    assert conversation.prompt_ids[: len(asked)] == asked


def _fails(*args: Any, **options: Any) -> Any:
    raise DataError("no more")


def test_half_a_surrogate_pair_is_refused_as_such(engine: Engine) -> None:
    """In the first turn and in later ones, and in plain text."""
    for conversation in (engine.conversation(), engine.conversation("Be brief.")):
        with pytest.raises(DataError, match="character 4 of a message is U\\+D800"):
            conversation.send("so \ud800", max_new_tokens=3)
        conversation.send("so", max_new_tokens=3)
        with pytest.raises(DataError, match="U\\+D800"):
            conversation.send("so \ud800", max_new_tokens=3)
        assert contents(conversation)[-2] == "so"
    with pytest.raises(DataError, match="U\\+DCFF"):
        engine.generate("\udcff", max_new_tokens=3)


def test_messages_may_be_edited_between_turns(engine: Engine) -> None:
    conversation = engine.conversation()
    for question in QUESTIONS[:2]:
        conversation.send(question, max_new_tokens=6)
    first = conversation.prompt_ids[: len(engine.encode(conversation.messages[:1])) + 6]
    del conversation.messages[2:]
    result = conversation.send(QUESTIONS[2], max_new_tokens=6)
    assert conversation.prompt_ids[: len(first)] == first
    assert result.stats.cached_tokens >= keeps(engine) * len(first)
    conversation.messages[1]["content"] = "Nothing."
    conversation.send("So?", max_new_tokens=6)
    assert "assistant\nNothing.<|im_end|>" in engine.base.tokenizer.decode(conversation.prompt_ids)


def test_a_template_without_a_system_role(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.base.tokenizer, "chat_template", NO_SYSTEM)
    with pytest.raises(DataError, match="System role not supported"):
        engine.conversation(system="Be kind.").send("a", max_new_tokens=2)
    conversation = engine.conversation()
    for question in QUESTIONS[:2]:
        result = conversation.send(question, max_new_tokens=3)
    assert result.token_ids == plain(engine, conversation.prompt_ids, 3)


def test_a_model_without_a_tokenizer_has_no_conversation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.base, "tokenizer", None)
    with pytest.raises(ConfigError, match="without a tokenizer"):
        engine.conversation().send("a", max_new_tokens=2)
