"""Text as it comes: pieces add up, characters are whole, stop strings never show."""

import random

import pytest

from medusa_kit.base.model import BaseModel
from medusa_kit.infer.detokenize import Detokenizer, StopStrings, TextStream, cut_at_stop

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


@pytest.mark.parametrize(
    "stops", [("wor",), ("l", "zzz"), ("lo w", "o w"), ("never",), ("ab", "b")]
)
@pytest.mark.parametrize("seed", range(5))
def test_stop_strings_however_the_tokens_come_in(tokenizer, stops, seed: int) -> None:
    text = "hello world, aab cab"
    ids = ids_of(tokenizer, text)
    draw = random.Random(seed)
    stream, shown = TextStream(tokenizer, stops), ""
    while ids:
        size = draw.randint(1, 4)
        chunk, ids = ids[:size], ids[size:]
        shown += stream.push(chunk)
        assert not any(stop in shown for stop in stops)
    shown += stream.finish()
    places = [text.find(stop) for stop in stops if stop in text]
    assert shown == text[: min(places, default=len(text))] == cut_at_stop(text, stops)


def test_the_token_that_completes_a_stop_string_is_named(tokenizer) -> None:
    ids = ids_of(tokenizer, "one two three two")
    watcher = StopStrings(tokenizer, ("two", "e t"))
    completed = [index for index, token in enumerate(ids) if watcher.push(token)]
    text = "one two three two"
    ends = [i for i in range(len(text)) if text[: i + 1].endswith(("two", "e t"))]
    assert set(ends) <= set(completed)
    assert completed[0] == ends[0]


def test_special_tokens_are_no_text(tokenizer, chat_base: BaseModel) -> None:
    stop = next(iter(chat_base.stop_token_ids))
    stream = TextStream(tokenizer)
    assert stream.push([*ids_of(tokenizer, "hi"), stop]) + stream.finish() == "hi"
