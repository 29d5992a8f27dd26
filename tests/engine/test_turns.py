"""A conversation's next prompt: earlier turns keep their ids, and templates have the last word."""

from typing import Any

import pytest
from support.debug_model import FORGETFUL, STRIPPING, TEMPLATES, TOKENIZERS, small_tokenizer

from medusa_kit.data.chat import encode_prompt
from medusa_kit.data.readers import Message
from medusa_kit.engine.turns import Answered, Prompt, next_prompt
from medusa_kit.infer.decode.detokenize import text_of

QUESTIONS = ("Is ab a word?", "And  aab?", "Why?")
SAID = ("No, ab is none.", "a ba ab", "Who knows")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def prompt_of(tokenizer: Any, messages: list[Message], before: Answered | None) -> Prompt:
    return next_prompt(tokenizer, messages, before, lambda some: encode_prompt(tokenizer, some))


def answered(tokenizer: Any, prompt: Prompt, ids: list[int], text: str | None = None) -> Answered:
    content = text_of(tokenizer, ids) if text is None else text
    return Answered(prompt, {"role": "assistant", "content": content}, ids)


def then(tokenizer: Any, turn: Answered, question: str) -> Prompt:
    return prompt_of(tokenizer, [*turn.prompt.messages, turn.message, user(question)], turn)


def in_letters(tokenizer: Any, prompt: Prompt, text: str) -> list[int]:
    """The ids of an answer after this prompt, with `a` and `b` where encoding it gives `ab`."""
    before = ". " if prompt.text.endswith("[/INST]") else "."
    ids = tokenizer(before + text, add_special_tokens=False).input_ids
    return apart(tokenizer, ids[ids.index(tokenizer.convert_tokens_to_ids(".")) + 1 :])


def apart(tokenizer: Any, ids: list[int]) -> list[int]:
    """With `a` and `b` for every `ab`."""
    a, b, ab = tokenizer.convert_tokens_to_ids(["a", "b", "ab"])
    return [part for token in ids for part in ((a, b) if token == ab else (token,))]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_what_the_model_wrote_stays_and_the_rest_is_the_templates(
    template: str, kind: str, spaced: bool
) -> None:
    """`spaced`: whether whoever sends an answer back keeps the first space that it has behind its
    prompt."""
    tokenizer = small_tokenizer(template, kind)
    prompt = prompt_of(tokenizer, [user(QUESTIONS[0])], None)
    assert prompt.ids == encode_prompt(tokenizer, prompt.messages)
    for said, question in zip(SAID, QUESTIONS[1:], strict=False):
        ids = in_letters(tokenizer, prompt, said)
        shown = text_of(tokenizer, ids, prompt=prompt.ids if spaced else ())
        turn = answered(tokenizer, prompt, ids, shown)
        assert turn.message["content"].strip() == said
        prompt = then(tokenizer, turn, question)
        assert prompt.ids[: len(turn.all_ids)] == turn.all_ids
        assert not prompt.rewritten
        again = encode_prompt(tokenizer, prompt.messages)
        assert prompt.ids != again
        assert apart(tokenizer, prompt.ids) == apart(tokenizer, again)


def test_dropped_thoughts_are_read_out_of_the_prompt_and_what_precedes_them_is_kept() -> None:
    tokenizer = small_tokenizer(FORGETFUL)
    prompt = prompt_of(tokenizer, [user("Is it?")], None)
    turn = answered(tokenizer, prompt, in_letters(tokenizer, prompt, "ab ab</think>ab"))
    later = then(tokenizer, turn, "And ab?")
    assert later.ids == encode_prompt(tokenizer, later.messages)
    assert later.ids[: len(prompt.ids)] == prompt.ids
    assert later.rewritten
    # An answer without thoughts keeps its ids, though one before it was changed.
    turn = answered(tokenizer, later, in_letters(tokenizer, later, "ab"))
    last = then(tokenizer, turn, "So?")
    assert last.ids[: len(turn.all_ids)] == turn.all_ids
    assert not last.rewritten


def test_a_template_that_changes_the_question_before_is_encoded_anew() -> None:
    """As Qwen 3's without thinking: what the answer was asked with is not in later turns."""
    asked = "{% if add_generation_prompt %}{{ '<think>\n</think>\n' }}{% endif %}"
    tokenizer = small_tokenizer(TEMPLATES["chatml"] + asked)
    prompt = prompt_of(tokenizer, [user("Is it?")], None)
    later = then(tokenizer, answered(tokenizer, prompt, in_letters(tokenizer, prompt, "ab")), "So?")
    assert later.ids == encode_prompt(tokenizer, later.messages)
    assert later.rewritten


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("template", "said", "cut", "kept"),
    [
        ("chatml", "Yes. ab STOP", "Yes. ", 5),  # at a stop string
        ("chatml", "Yes. ab", "Yes. a", 6),
        ("chatml", "STOP", "", 0),
        ("stripping", "Yes ab \n", "Yes ab \n", 6),
        ("stripping", "\n Yes", "\n Yes", 0),
    ],
)
def test_of_a_cut_answer_that_much_is_kept(
    template: str, said: str, cut: str, kept: int, kind: str
) -> None:
    tokenizer = small_tokenizer(TEMPLATES[template], kind)
    prompt = prompt_of(tokenizer, [user("Is it?")], None)
    ids = in_letters(tokenizer, prompt, said)
    later = then(tokenizer, answered(tokenizer, prompt, ids, cut), "So?")
    at = len(prompt.ids)
    assert later.ids[: at + kept] == [*prompt.ids, *ids[:kept]]
    assert apart(tokenizer, later.ids) == apart(tokenizer, encode_prompt(tokenizer, later.messages))


def test_edited_messages_are_encoded_anew_and_those_before_are_kept() -> None:
    tokenizer = small_tokenizer(TEMPLATES["chatml"])
    prompt = prompt_of(tokenizer, [user(QUESTIONS[0])], None)
    turns = list[Answered]()
    for said, question in zip(SAID, QUESTIONS[1:], strict=False):
        turns.append(answered(tokenizer, prompt, in_letters(tokenizer, prompt, said)))
        prompt = then(tokenizer, turns[-1], question)
    first, second = turns
    known = [*second.prompt.messages, second.message]
    undone = prompt_of(tokenizer, [*known[:2], user("Other ab?")], second)
    assert undone.ids == then(tokenizer, first, "Other ab?").ids
    assert not undone.rewritten
    for place, kept in ((0, 0), (1, len(first.prompt.ids)), (3, len(second.prompt.ids))):
        edited = [dict(message) for message in known]
        edited[place]["content"] += "ab"  # begins as it did
        after = prompt_of(tokenizer, [*edited, user("So?")], second)
        assert (
            after.ids[kept:] == encode_prompt(tokenizer, after.messages)[-len(after.ids[kept:]) :]
        )
        assert after.ids[:kept] == second.all_ids[:kept]
        assert not after.rewritten
    shorter = prompt_of(tokenizer, [user("Is")], second)
    assert shorter.ids == encode_prompt(tokenizer, shorter.messages)


def test_without_a_template_everything_is_encoded() -> None:
    tokenizer = small_tokenizer(STRIPPING)
    tokenizer.chat_template = None
    prompt = prompt_of(tokenizer, [user("ab")], None)
    assert prompt.ids == encode_prompt(tokenizer, "ab")


def test_a_tokenizer_that_encodes_messages_in_a_way_of_its_own_always_does() -> None:
    tokenizer = small_tokenizer(TEMPLATES["chatml"])

    def encode(messages: list[Message]) -> list[int]:
        return [7, *encode_prompt(tokenizer, messages)]

    prompt = next_prompt(tokenizer, [user("Is it?")], None, encode)
    turn = answered(tokenizer, prompt, in_letters(tokenizer, prompt, "ab"))
    later = [*prompt.messages, turn.message, user("So?")]
    again = next_prompt(tokenizer, later, turn, encode)
    assert again.ids == encode(later)
    assert again.rewritten
