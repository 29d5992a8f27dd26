"""Text as it comes: pieces add up, characters are whole, stop strings never show."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from medusa_kit.base.model import BaseModel
from medusa_kit.infer.detokenize import Detokenizer, StopStrings, TextStream, text_before, text_of

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
    watcher = StopStrings(tokenizer, stops)
    last = next((n for n, token in enumerate(ids, 1) if watcher.push(token)), len(ids))
    cut = text_before(tokenizer, ids[:last], watcher.place)
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


def test_special_tokens_are_no_text(tokenizer, chat_base: BaseModel) -> None:
    stop = next(iter(chat_base.stop_token_ids))
    stream = TextStream(tokenizer)
    assert stream.push([*ids_of(tokenizer, "hi"), stop]) + stream.finish() == "hi"


# Tokenizers of every usual kind.

PIECES = ("▁", "▁▁", "▁hello", "▁wor", "ld", "h", "é", "!", ".", "▁a")


def _wrapped(tokenizer: Tokenizer, special: Sequence[str], **options: Any) -> Any:
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def byte_level() -> Any:
    """As GPT-2 and Llama 3: tokens are parts of characters, or whole ones."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġhello", "ä¸", "ä¸Ń", "Ġ."]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer, ["<|end|>"])


def _pieces_and_bytes(decoder: Any) -> Any:
    vocabulary = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    tokens = {piece: i for i, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(tokens, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    return _wrapped(tokenizer, ["<unk>", "</s>"])


def byte_fallback() -> Any:
    """As Llama 2 and Mistral: the space before the first word is dropped."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _pieces_and_bytes(decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)]))


def byte_fallback_with_spaces() -> Any:
    """As Gemma: the space before the first word stays."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _pieces_and_bytes(decoders.Sequence(parts))


def metaspace() -> Any:
    """A space before the first word is dropped; byte tokens are shown as they are spelled."""
    return _pieces_and_bytes(decoders.Metaspace())


def word_piece() -> Any:
    """As BERT, whose spaces before full stops transformers cleans up."""
    pieces = ["[UNK]", "hello", "##ing", "wor", "##ld", ".", ",", "'", "s", "do", "n't", "##é"]
    tokens = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(tokens, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return _wrapped(tokenizer, ["[UNK]"], clean_up_tokenization_spaces=True)


def slow_bytes() -> Any:
    """Without the tokenizers library."""
    return ByT5Tokenizer()


KINDS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (byte_level, byte_fallback, byte_fallback_with_spaces, metaspace, word_piece,
                 slow_bytes)
}  # fmt: skip


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
