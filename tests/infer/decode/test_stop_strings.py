"""Stop strings end an answer where transformers' do, and watcher, display and final text agree."""

import random
from typing import Any

import pytest
import torch
from support.text.tokenizer_kinds import KINDS, byte_fallback, byte_level
from transformers import StopStringCriteria

from medusa_kit.base.model import BaseModel
from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.detokenize import StopStrings, TextStream, text_before, text_of
from medusa_kit.infer.decode.text.byte_search import ByteSearch
from medusa_kit.infer.decode.text.token_bytes import UNFINISHED

WRITTEN = "a wor😀ld é中 hello\n! hel hello"


@pytest.fixture
def tokenizer(chat_base: BaseModel):
    """One token a byte, so most characters arrive in pieces."""
    return chat_base.tokenizer


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "stops", [("wor",), ("l", "zzz"), ("lo w", "o w"), ("never",), ("ab", "b")]
)
@pytest.mark.parametrize("seed", range(5))
def test_stop_strings_however_the_tokens_come_in(tokenizer, stops, seed: int) -> None:
    text = "hello world, aab cab"
    ids = ids_of(tokenizer, text)
    watcher = StopStrings(tokenizer, stops)
    last = next((n for n, token in enumerate(ids, 1) if watcher.push(token)), len(ids))
    cut = text_before(tokenizer, ids[:last], watcher.position)
    draw = random.Random(seed)
    stream, shown = TextStream(tokenizer, stops), ""
    while ids:
        size = draw.randint(1, 4)
        chunk, ids = ids[:size], ids[size:]
        shown += stream.push(chunk)
        assert not any(stop in shown for stop in stops)
    shown += stream.finish()
    places = [text.find(stop) for stop in stops if stop in text]
    assert shown == text[: min(places, default=len(text))] == cut


def test_the_token_that_completes_a_stop_string_is_named(tokenizer) -> None:
    ids = ids_of(tokenizer, "one two three two")
    watcher = StopStrings(tokenizer, ("two", "e t"))
    completed = [index for index, token in enumerate(ids) if watcher.push(token)]
    text = "one two three two"
    ends = [i for i in range(len(text)) if text[: i + 1].endswith(("two", "e t"))]
    assert set(ends) <= set(completed)
    assert completed[0] == ends[0]


def length(tokenizer: Any, stops: list[str], ids: list[int]) -> int | None:
    """Of the answer, in tokens, by transformers."""
    criteria = StopStringCriteria(tokenizer, stops)
    ends = (n for n in range(1, len(ids) + 1) if criteria(torch.tensor([ids[:n]]), None)[0])
    return next(ends, None)


def watched(tokenizer: Any, stops: list[str], ids: list[int]) -> tuple[int | None, StopStrings]:
    watcher = StopStrings(tokenizer, stops)
    return next((n for n, token in enumerate(ids, 1) if watcher.push(token)), None), watcher


def streamed(tokenizer: Any, stops: list[str], ids: list[int], keep_special: bool) -> str:
    stream = TextStream(tokenizer, stops, keep_special)
    return "".join(stream.push([token]) for token in ids) + stream.finish()


def some_tokens(tokenizer: Any, draw: random.Random) -> list[int]:
    """Words with tokens at random among them."""
    start = draw.randrange(len(WRITTEN))
    ids = ids_of(tokenizer, WRITTEN[start:])[: draw.randint(0, 12)]
    for _ in range(draw.randint(1, 4)):
        ids.insert(draw.randint(0, len(ids)), draw.randrange(len(tokenizer)))
    return ids


def some_stops(text: str, draw: random.Random) -> list[str]:
    starts = [draw.randrange(len(text)) for _ in range(draw.randint(1, 3))]
    return [text[start : start + draw.randint(1, 6)] for start in starts]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_with_spaces"])
def test_answers_are_as_long_as_those_of_transformers(kind: str) -> None:
    """Whatever lies around a stop string: parts of characters, special tokens, other tokens."""
    tokenizer, draw, found = KINDS[kind](), random.Random(0), 0
    for _ in range(150):
        ids = some_tokens(tokenizer, draw)
        text = text_of(tokenizer, ids, keep_special=True).replace(UNFINISHED, "")
        stops = some_stops(text, draw) if text else ["h"]
        expected = length(tokenizer, stops, ids)
        assert watched(tokenizer, stops, ids)[0] == expected, (ids, stops)
        found += expected is not None
    assert found > 50


@pytest.mark.parametrize("keep_special", [False, True])
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("word_piece", "metaspace")]
)
def test_what_is_shown_is_the_text_before_the_stop_string(kind: str, keep_special: bool) -> None:
    tokenizer, draw = KINDS[kind](), random.Random(1)
    for _ in range(150):
        ids = some_tokens(tokenizer, draw)
        text = text_of(tokenizer, ids, keep_special=True)
        if not text:
            continue
        stops = some_stops(text, draw)
        end, watcher = watched(tokenizer, stops, ids)
        final = text_before(tokenizer, ids[:end], watcher.position, keep_special)
        assert streamed(tokenizer, stops, ids, keep_special) == final, (ids, stops)
        whole = text_of(tokenizer, ids[:end], keep_special=True)
        places = [whole.find(stop) for stop in stops if stop in whole]
        if keep_special and UNFINISHED not in whole and places:
            assert final == whole[: min(places)], (ids, stops)


SPECIAL = [
    # tokens, stop string, text shown, with special tokens kept
    (["h", "<|end|>", "i"], "<|end|>", "h", "h"),
    (["h", "<|end|>", "i"], "<|end|>i", "h", "h"),
    (["h", "<|end|>", "i"], "h<|end|>", "", ""),
    (["h", "<|end|>", "i"], "nd|>i", "h", "h<|e"),
    (["h", "<|end|>", "i", "h", "i"], "hi", "hi", "h<|end|>i"),  # the first "hi" is none
]


@pytest.mark.parametrize(("tokens", "stop", "shown", "kept"), SPECIAL)
def test_stop_strings_and_special_tokens(
    tokens: list[str], stop: str, shown: str, kept: str
) -> None:
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(tokens)
    end, watcher = watched(tokenizer, [stop], ids)
    assert end == length(tokenizer, [stop], ids)
    for keep_special, expected in ((False, shown), (True, kept)):
        assert streamed(tokenizer, [stop], ids, keep_special) == expected
        assert text_before(tokenizer, ids[:end], watcher.position, keep_special) == expected


BYTES = [
    # tokens, stop strings, tokens of the answer, text shown
    (["▁a", "<0x0A>"], ["\n"], 2, "a"),
    (["<0x0A>"] * 3, ["\n"], 1, ""),
    (["<0x0A>"] * 3, ["\n\n"], 2, ""),
    (["▁a", "<0xE4>", "<0xB8>", "<0xAD>", "<0x0A>"], ["中\n", "x"], 5, "a"),
    (["▁a", "<0xE4>", "<0xB8>", "<0x0A>"], ["\n"], 4, "a" + 2 * UNFINISHED),
    (["▁hello"], [" hel"], 1, ""),  # a space before the first word counts, though it is not shown
    (["▁hello"], ["lo"], 1, "hel"),
    (["▁hello", "▁wor", "ld"], ["lo w", "o w"], 2, "hel"),
]


@pytest.mark.parametrize(("tokens", "stops", "size", "shown"), BYTES)
def test_a_stop_string_in_byte_tokens_does_not_wait_for_the_end_of_their_run(
    tokens: list[str], stops: list[str], size: int, shown: str
) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(tokens)
    end, watcher = watched(tokenizer, stops, ids)
    assert end == size == length(tokenizer, stops, ids)
    assert text_before(tokenizer, ids[:end], watcher.position) == shown
    assert streamed(tokenizer, stops, ids, keep_special=False) == shown


def test_without_a_tokenizer_stop_strings_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        StopStrings(None, ["a"])


def test_bytes_are_found_as_they_are_in_the_whole() -> None:
    draw = random.Random(0)

    def word(most: int) -> bytes:
        return bytes(draw.choice(b"ab") for _ in range(draw.randint(1, most)))

    for _ in range(500):
        words, parts = [word(6) for _ in range(draw.randint(1, 3))], [word(4) for _ in range(12)]
        search, seen = ByteSearch(words), b""
        for part in parts:
            seen += part
            found = search.push(part)
            places = [seen.find(one) for one in words if one in seen]
            assert found == min(places, default=None)
            if places:
                break
            begun = [n for one in words for n in range(len(one)) if seen.endswith(one[:n])]
            assert search.begun == max(begun)
