"""Tokenizers of every usual kind, with few tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

PIECES = ("▁", "▁▁", "▁hello", "▁wor", "ld", "h", "é", "!", ".", "▁a")


def _wrapped(tokenizer: Tokenizer, special: Sequence[str], **options: Any) -> Any:
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("né ü", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def byte_level() -> Any:
    """As GPT-2 and Llama 3: tokens are parts of characters, or whole ones."""
    return _parts_of_characters(decoders.ByteLevel())


def byte_level_and_more() -> Any:
    """Something is done to the text besides."""
    parts = [decoders.ByteLevel(), decoders.Replace("~", " ")]
    return _parts_of_characters(decoders.Sequence(parts))


def _parts_of_characters(decoder: Any) -> Any:
    pieces = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "Ġhello",
        "ä¸",
        "ä¸Ń",
        "Ġ.",
        "ðŁĺ",
        "ĢĠ",
        "Ńhi",
    ]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoder
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


def word_ends() -> Any:
    """As GPT: a space follows the end of a word, unless it ends the text."""
    pieces = ["<unk>", "hello</w>", "hel", "lo</w>", "wor", "ld</w>", ".</w>", "é</w>", "s"]
    tokens = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(tokens, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return _wrapped(tokenizer, ["<unk>"])


def slow_bytes() -> Any:
    """Without the tokenizers library."""
    return ByT5Tokenizer()


KINDS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (byte_level, byte_level_and_more, byte_fallback, byte_fallback_with_spaces,
                 metaspace, word_piece, word_ends, slow_bytes)
}  # fmt: skip


class Counting:
    """A tokenizer that counts the tokens it is asked to decode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.decoded += len(ids)
        return str(self._tokenizer.decode(ids, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
