"""Text as it comes: pieces add up, characters are whole."""

import random
from typing import Any

import pytest
from support.text.tokenizer_kinds import KINDS, Counting, byte_fallback, word_piece

from medusa_kit.base.model import BaseModel
from medusa_kit.data.located import common_start
from medusa_kit.infer.decode.detokenize import Detokenizer, TextStream, text_of

TEXT = "Grüße, 世界! 👩‍🚀 naïve — déjà vu\n\nend"


@pytest.fixture
def tokenizer(chat_base: BaseModel):
    """One token a byte, so most characters arrive in pieces."""
    return chat_base.tokenizer


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_pieces_add_up_and_no_half_character_is_shown(tokenizer) -> None:
    ids = ids_of(tokenizer, TEXT)
    assert len(ids) > len(TEXT)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces.count("") > 5


def test_what_is_left_unfinished_is_shown_at_the_end(tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = ids_of(tokenizer, "a👩")[:-1]
    assert "".join(detokenizer.push(token) for token in ids) == "a"
    assert "\ufffd" in detokenizer.finish()


def test_special_tokens_are_no_text(tokenizer, chat_base: BaseModel) -> None:
    stop = next(iter(chat_base.stop_token_ids))
    stream = TextStream(tokenizer)
    assert stream.push([*ids_of(tokenizer, "hi"), stop]) + stream.finish() == "hi"


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_text_of_all_tokens(kind: str) -> None:
    """Whatever tokens a model may write, whole characters and special tokens among them or not."""
    tokenizer, draw = KINDS[kind](), random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 12))]
        detokenizer = Detokenizer(tokenizer)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        assert "".join(pieces) == text_of(tokenizer, ids), (ids, pieces)
        assert "".join(pieces) == tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("keep_special", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_long_runs_too(kind: str, keep_special: bool) -> None:
    """Of one token or several: broken characters, special tokens, ids that no token has."""
    tokenizer, draw = KINDS[kind](), random.Random(2)
    size = len(tokenizer) + (0 if kind == "slow_bytes" else 5)
    for _ in range(100):
        ids: list[int] = []
        for _ in range(draw.randint(1, 4)):
            some = [draw.randrange(size) for _ in range(draw.randint(1, 3))]
            ids += some * draw.randint(1, 12)
        detokenizer = Detokenizer(tokenizer, keep_special)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        assert "".join(pieces) == text_of(tokenizer, ids, keep_special), ids


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_can_be_kept(kind: str) -> None:
    tokenizer, draw = KINDS[kind](), random.Random(1)
    for _ in range(200):
        ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 12))]
        detokenizer = Detokenizer(tokenizer, keep_special=True)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        assert "".join(pieces) == text_of(tokenizer, ids, keep_special=True)
        assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_run_of_bytes_waits_for_its_end() -> None:
    """A broken byte after 中 changes 中 too: that is how such a tokenizer decodes."""
    tokenizer = byte_fallback()
    tokens = ["<0xE4>", "<0xB8>", "<0xAD>", "ld", "▁hello", "<0xE4>", "<0xB8>", "<0xAD>", "<0xE4>"]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    assert pieces == ["", "", "", "中ld", " hello", "", "", "", ""]
    assert detokenizer.finish() == "\ufffd" * 4


def test_spaces_stay_as_the_model_wrote_them() -> None:
    tokenizer = word_piece()
    ids = tokenizer.convert_tokens_to_ids(["do", "'", "s", "hello", "##ing"])
    assert text_of(tokenizer, ids) == "do ' s helloing"


BROKEN = {
    "byte_level": ["Ģ"],  # one byte of a character, as byte-level tokenizers spell it
    "byte_level_and_more": ["ð", "Ł", "ĺ"],
    "byte_fallback": ["<0xFF>"],
    "byte_fallback_with_spaces": ["<0xF0>", "<0x9F>"],
    "slow_bytes": ["ÿ"],
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", BROKEN)
def test_the_cost_of_broken_characters_is_linear(kind: str, special: bool) -> None:
    """In tokens that are decoded, by the display and by the watcher."""
    tokenizer = Counting(KINDS[kind]())
    broken = tokenizer.convert_tokens_to_ids(BROKEN[kind])
    broken += [max(tokenizer.added_tokens_decoder)] * special
    ids = (broken * 1000)[:1000] + tokenizer.encode("h!", add_special_tokens=False)
    stream, text = TextStream(tokenizer, ["never", "!"]), text_of(tokenizer, ids)
    tokenizer.decoded = 0
    shown = "".join(stream.push([token]) for token in ids)
    assert tokenizer.decoded <= 16 * len(ids)
    assert shown + stream.finish() == text[: text.index("!")]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_special_tokens_without_end_cost_no_decoding(kind: str) -> None:
    tokenizer = Counting(KINDS[kind]())
    (special,) = (i for i, t in tokenizer.added_tokens_decoder.items() if t.special and i != 0)
    detokenizer = Detokenizer(tokenizer)
    word = tokenizer.convert_tokens_to_ids("h")
    first, tokenizer.decoded = detokenizer.push(word), 0
    assert first == "h"
    assert [detokenizer.push(special) for _ in range(100)] == [""] * 100
    assert tokenizer.decoded == 0
    assert detokenizer.push(word) == "h"


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert stream.push([1, 2, 3]) + stream.finish() == text_of(None, [1, 2, 3]) == ""


def behind(tokenizer: Any, prompt: list[int], ids: list[int], keep_special: bool = False) -> str:
    """What tokens add to a prompt, by decoding both together."""

    def text(tokens: list[int]) -> str:
        return str(
            tokenizer.decode(
                tokens, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
            )
        )

    before, together = text(prompt), text([*prompt, *ids])
    return together[common_start(before, together) :]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_what_prompt_and_answer_together_add(kind: str) -> None:
    """The first space included, however many special tokens end the prompt. Streamed or not."""
    tokenizer, draw = KINDS[kind](), random.Random(3)
    special = [i for i in tokenizer.all_special_ids if i < len(tokenizer)][:1]
    words = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    for _ in range(300):
        prompt = [draw.choice(words) for _ in range(draw.randint(0, 12))]
        prompt = special * draw.randint(0, 1) + prompt + special * draw.choice([0, 0, 1, 12])
        ids = [draw.choice(words) for _ in range(draw.randint(1, 6))]
        expected = behind(tokenizer, prompt, ids)
        detokenizer = Detokenizer(tokenizer, prompt=prompt)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        assert "".join(pieces) == text_of(tokenizer, ids, prompt=prompt) == expected, (prompt, ids)


FIRST = [
    # the prompt's tokens, the answer's, its text
    ([], ["▁hello"], "hello"),  # it begins the text
    (["</s>"], ["▁hello"], "hello"),
    (["▁a"], ["▁hello"], " hello"),
    (["▁a"], ["h"], "h"),
    (["▁a", "<0x0A>"], ["▁hello"], " hello"),
    (["▁a", *["</s>"] * 20], ["▁hello"], " hello"),
    (["▁a"], ["</s>", "▁hello"], " hello"),
    (["▁a"], ["▁", "▁hello"], "  hello"),
    (["▁a", *["<0xE4>", "<0xB8>", "<0xAD>"] * 5], ["<0xC3>", "<0xA9>", "▁hello"], "é hello"),
    (["▁a", "<0xE4>", "<0xB8>"], ["<0xAD>", "▁hello"], "中 hello"),
]


@pytest.mark.parametrize("keep_special", [False, True])
@pytest.mark.parametrize(("prompt", "answer", "text"), FIRST)
def test_the_first_space(
    prompt: list[str], answer: list[str], text: str, keep_special: bool
) -> None:
    tokenizer = byte_fallback()
    before, ids = map(tokenizer.convert_tokens_to_ids, (prompt, answer))
    if keep_special and "</s>" in answer:
        text = "</s>" + text
    stream = TextStream(tokenizer, keep_special=keep_special, prompt=before)
    assert text_of(tokenizer, ids, keep_special, before) == text
    assert stream.push(ids) + stream.finish() == text
