"""What log-probabilities say of each token's text: its bytes, its offset, the alternatives."""

import json
import random
from typing import Any

import pytest
from support.serving.live_server import LiveServer
from support.text.tokenizer_kinds import KINDS, byte_fallback, byte_level

from medusa_kit.infer.decode.detokenize import TextStream, text_of
from medusa_kit.infer.decode.text.token_bytes import ALPHABET, UNFINISHED
from medusa_kit.infer.details import TokenScore
from medusa_kit.serve.logprobs import (
    Scored,
    ScoredText,
    completion_logprobs,
    token_logprobs,
)

WRITTEN = "a 😀é\n 世界 hello! hi"


def scored(
    tokenizer: Any, ids: list[int], stops: tuple[str, ...] = (), likeliest: list[int] | None = None
) -> tuple[str, list[Scored]]:
    """(text, what is said of its tokens), as tokens come one by one."""
    stream, reader, text, found = TextStream(tokenizer, stops), ScoredText(tokenizer), "", []
    pieces = [piece for token in ids for piece in stream.settle([token])] + stream.settle_all()
    for piece in pieces:
        text += piece.text
        scores = [TokenScore(-1.0, [(other, -2.0) for other in likeliest or [token]])
                  for token in piece.tokens]  # fmt: skip
        found += reader.read(piece, scores)
    return text, found


@pytest.mark.parametrize("kind", KINDS)
def test_joined_bytes_are_the_text(kind: str) -> None:
    """Special tokens among it add nothing."""
    tokenizer, draw, whole = KINDS[kind](), random.Random(0), 0
    for _ in range(200):
        ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 4))]
        ids += tokenizer.encode(WRITTEN[draw.randrange(8) :], add_special_tokens=False)
        text, found = scored(tokenizer, ids)
        assert text == text_of(tokenizer, ids)
        assert [one.chosen.token for one in found] == ids
        if UNFINISHED not in text:
            whole += 1
            assert b"".join(one.chosen.added for one in found).decode() == text, ids
    assert whole > 10


def test_offsets_are_where_tokens_begin() -> None:
    """A token within a character has the offset of that character."""
    tokenizer = byte_level()
    letters = {byte: letter for letter, byte in ALPHABET.items()}
    ids = tokenizer.convert_tokens_to_ids([letters[byte] for byte in WRITTEN.encode()])
    ids.insert(4, tokenizer.convert_tokens_to_ids("<|end|>"))  # within a character
    text, found = scored(tokenizer, ids)
    before = [tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids))]
    assert text == WRITTEN
    assert [one.offset for one in found] == [len(one.rstrip(UNFINISHED)) for one in before]


def test_offsets_in_runs_of_byte_tokens() -> None:
    tokenizer = byte_fallback()
    words = ["▁hello", "<0xE4>", "<0xB8>", "<0xAD>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", "ld"]
    text, found = scored(tokenizer, tokenizer.convert_tokens_to_ids(words))
    assert text == "hello中\néld"
    assert [one.offset for one in found] == [0, 5, 5, 5, 6, 6, 7, 7, 8]


def test_characters_that_several_tokens_make() -> None:
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(["h", "ðŁĺ", "Ģ", "Ġhello"])
    text, found = scored(tokenizer, ids)
    assert text == "h😀 hello"
    entries = token_logprobs(found)
    assert [entry["bytes"] for entry in entries] == [
        [104], [0xF0, 0x9F, 0x98], [0x80], list(b" hello"),
    ]  # fmt: skip
    assert [one.offset for one in found] == [0, 1, 1, 2]


def test_the_first_space_and_the_others() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["▁hello", "▁wor", "ld", "</s>", "<0x0A>", "▁"])
    text, found = scored(tokenizer, ids)
    told = completion_logprobs(found, 1)
    assert text == "hello world\n "
    assert told["tokens"] == ["hello", " wor", "ld", "</s>", "\n", " "]
    assert told["text_offset"] == [0, 5, 9, 11, 11, 12]
    assert [entry["bytes"] for entry in token_logprobs(found)][3] == []


def test_special_tokens_that_the_text_keeps_are_told() -> None:
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(["h", "ðŁĺ", "<|end|>", "h"])
    stream, reader = TextStream(tokenizer, keep_special=True), ScoredText(tokenizer, frozenset())
    pieces = [*stream.settle(ids), *stream.settle_all()]
    score = TokenScore(-1.0, [])
    found = [one for piece in pieces for one in reader.read(piece, [score] * len(piece.tokens))]
    assert "".join(piece.text for piece in pieces) == f"h{UNFINISHED}<|end|>h"
    added = [one.chosen.added for one in found]
    assert added == [b"h", b"\xf0\x9f\x98", b"<|end|>", b"h"]
    assert [one.offset for one in found] == [0, 1, 2, 9]


def test_bytes_that_are_no_character() -> None:
    """Each is shown by itself where a run of byte tokens is broken."""
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["h", "<0xE4>", "<0xB8>", "!", "ld"])
    text, found = scored(tokenizer, ids)
    assert text == "h" + 2 * UNFINISHED + "!ld"
    assert [one.chosen.added for one in found] == [b"h", b"\xe4", b"\xb8", b"!", b"ld"]
    assert [one.offset for one in found] == [0, 1, 2, 3, 4]


def test_alternatives_have_names_of_their_own() -> None:
    tokenizer = byte_fallback()
    words = ["h", "<0x68>", "▁", "<0x20>", "<0xE4>", "<0xB8>", "</s>"]
    others = tokenizer.convert_tokens_to_ids(words)
    for ids in (others[:1], [others[0], others[0]]):  # the first of the text, and one within it
        _, found = scored(tokenizer, ids, likeliest=others)
        (*_, named) = completion_logprobs(found, len(others))["top_logprobs"]
        assert len(named) == len(others)
        assert next(iter(named)) == "h"
        assert named.keys() > {"<0xE4>", "<0xB8>", "<0x68>", "</s>"}
    (*_, last) = token_logprobs(found)
    assert [bytes(one["bytes"]) for one in last["top_logprobs"]] == [
        b"h", b"h", b" ", b" ", b"\xe4", b"\xb8", b"",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [
        (("wor",), "hello ", ["hello", " "]),  # the stop begins within a token
        (("worl",), "hello ", ["hello", " ", "ld"]),
        ((" wor",), "hello", ["hello", " wor"]),
        (("ld\n",), "hello wor", ["hello", " wor", "ld", "\n"]),
        (("</s>",), "hello world\n", ["hello", " wor", "ld", "\n", "</s>"]),
        (("/s>",), "hello world\n", ["hello", " wor", "ld", "\n", "</s>"]),
        ((" hello",), "", ["hello"]),
    ],
)
def test_tokens_of_a_stop_string_have_no_bytes(
    stops: tuple[str, ...], text: str, tokens: list[str]
) -> None:
    """Each token that was decoded is reported."""
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["▁hello", "▁wor", "ld", "<0x0A>", "</s>"])
    shown, found = scored(tokenizer, ids, stops)
    assert (shown, [one.chosen.name for one in found]) == (text, tokens)
    assert b"".join(one.chosen.added for one in found).decode() == text


def test_the_chosen_token_is_among_the_likeliest_of_completions() -> None:
    tokenizer = byte_fallback()
    hello, world, other = tokenizer.convert_tokens_to_ids(["▁hello", "▁wor", "!"])
    _, found = scored(tokenizer, [hello, world], likeliest=[other, world])
    told = completion_logprobs(found, 2)["top_logprobs"]
    assert told == [{"!": -2.0, "wor": -2.0, "hello": -1.0}, {"!": -2.0, " wor": -2.0}]
    assert completion_logprobs(found, 0)["top_logprobs"] is None


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    text, found = scored(None, [5, 7])
    assert (text, completion_logprobs(found, 0)["tokens"]) == ("", ["5", "7"])


def _told(live: LiveServer, path: str, **asked: Any) -> tuple[str, list[Any], str]:
    """(text, what is said of tokens, finish_reason), streamed or not."""
    body = {"model": live.model, "temperature": 0, "max_tokens": 24, **asked}
    with live.http() as http:
        got = http.post(path, json=body)
    if asked.get("stream"):
        events = [line[6:] for line in got.text.split("\n") if line.startswith("data: {")]
        choices = [json.loads(event)["choices"][0] for event in events]
    else:
        choices = [got.json()["choices"][0]]
    text, told = "", []
    for choice in choices:
        said = choice.get("message") or choice.get("delta") or choice
        text += said.get("content") or said.get("text") or ""
        logprobs = choice["logprobs"] or {}
        told += logprobs.get("content") or zip(
            *(logprobs.get(key, []) for key in ("tokens", "text_offset", "top_logprobs")),
            strict=True,
        )
    return text, told, choices[-1]["finish_reason"]


@pytest.mark.parametrize("chat", [True, False])
def test_streamed_or_not_it_is_the_same(live: LiveServer, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked: dict[str, Any] = {"prompt": "the sea", "logprobs": 3}
    if chat:
        messages = [{"role": "user", "content": "What is the sea?"}]
        asked = {"messages": messages, "logprobs": True, "top_logprobs": 3}
    whole, told, _ = _told(live, path, **asked)
    assert len(told) > 10
    stop = next(c for c in whole[len(whole) // 2 :] if c.isascii())
    for more in ({}, {"stop": stop}):
        text, entries, reason = _told(live, path, **asked, **more)
        streamed = _told(live, path, stream=True, **asked, **more)
        assert streamed == (text, entries, reason)
        if more:
            assert (reason, text) == ("stop", whole[: whole.index(stop)])
            assert len(entries) < len(told)
            with live.http() as http:
                body = {"model": live.model, "temperature": 0, "max_tokens": 24, **asked, **more}
                got = http.post(path, json=body | {"return_token_ids": True}).json()
            assert len(entries) == len(got["choices"][0]["token_ids"])
        if chat:
            raw = b"".join(bytes(entry["bytes"]) for entry in entries)
            assert raw.decode(errors="replace") == text
