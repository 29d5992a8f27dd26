"""Named templates, and the token that ends a turn."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.debug_model import TOKENIZERS, small_tokenizer

from medusa_kit.base.gguf import CHATML_TEMPLATE, byte_tokenizer
from medusa_kit.bench import doctor_data
from medusa_kit.bench.doctor_case import Case
from medusa_kit.data.chat import encode_conversation, encode_prompt
from medusa_kit.data.template import NEIGHBOURS, encode_after
from medusa_kit.distill.openai_client import encode_again
from medusa_kit.errors import DataError

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
ENDS_THE_TEXT = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"  # as Phi-3's does
REFUSING = "{{ raise_exception('never') }}"


def tokenizer_with(template: Any, **names: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|end|>"]})
    tokenizer.chat_template = template
    for name, token in names.items():
        setattr(tokenizer, name, token)
    return tokenizer


def test_of_named_templates_the_default_is_taken() -> None:
    named = tokenizer_with({"default": CHATML_TEMPLATE, "tool_use": REFUSING})
    plain = tokenizer_with(CHATML_TEMPLATE)
    assert encode_conversation(named, TALK) == encode_conversation(plain, TALK)
    assert encode_prompt(named, "Hi") == encode_prompt(plain, "Hi")
    ids = encode_again(named, "Hello!", "stop")
    assert ids == encode_again(plain, "Hello!", "stop")


def test_named_templates_without_a_default_are_refused_by_their_names(chat_base: Any) -> None:
    named = tokenizer_with({"rag": CHATML_TEMPLATE, "tool_use": CHATML_TEMPLATE})
    message = "templates are named 'rag', 'tool_use'; expected one named 'default'"
    with pytest.raises(DataError, match=message):
        encode_conversation(named, TALK)
    with pytest.raises(DataError, match=message):
        encode_prompt(named, "Hi")
    chat_base.tokenizer = named
    found = doctor_data.chat_template(Case(chat_base))
    assert (found.status, message in found.what) == ("problem", True)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML_TEMPLATE, "<|im_end|>"),
        (CHATML_TEMPLATE.replace("<|im_end|>", "<|end|>"), "<|end|>"),
        (CHATML_TEMPLATE.replace("<|im_end|>", "<|end|>") + ENDS_THE_TEXT, "<|end|>"),
        (CHATML_TEMPLATE.replace("<|im_end|>", ""), "<|pad|>"),  # ends no turn
        ("{{ '<|im_start|>the same for all<|im_end|>' }}", "<|pad|>"),
        (REFUSING, "<|pad|>"),
        (None, "<|pad|>"),
    ],
)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_fetched_answer_ends_as_a_turn_does(template: Any, end: str, reason: str) -> None:
    """The tokenizer's end of text is another token, as in many models."""
    tokenizer = tokenizer_with(template, eos_token="<|pad|>")
    ids = encode_again(tokenizer, "Hello!", reason)
    assert tokenizer.decode(ids) == "Hello!" + (end if reason == "stop" else "")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_that_follows_other_text_has_no_space_of_its_own(kind: str) -> None:
    tokenizer = small_tokenizer(CHATML_TEMPLATE, kind)
    for before, text in (("Yes", "ab</s>"), ("Yes", " and"), ("</s>", "<s>ab")):
        both = tokenizer(before + text, add_special_tokens=False).input_ids
        after = encode_after(tokenizer, text)
        assert after == both[len(both) - len(after or []) :]
        assert tokenizer.decode(after) == text or kind != "bytes"
    assert encode_after(tokenizer, "") == []


@pytest.mark.parametrize("token", [0, 7])
def test_text_that_joins_with_whatever_precedes_it(token: int) -> None:
    """As one word, which the tokenizer knows or does not know."""
    words = {character: 9 if token else 0 for character in NEIGHBOURS}

    class Words:
        unk_token_id = 0

        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            return SimpleNamespace(input_ids=[words.get(text, token)])

    assert encode_after(Words(), "ab") is None
