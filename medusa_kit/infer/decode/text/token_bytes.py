"""What each token adds to a text, in bytes: a character may be split over several tokens."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, proxy

from transformers.convert_slow_tokenizer import bytes_to_unicode

UNFINISHED = "\ufffd"  # what a tokenizer prints for bytes that are no character
ALPHABET = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of byte-level tokenizers


def decoded(tokenizer: Any, ids: Sequence[int], keep_special: bool) -> str:
    """The text of these tokens. Spaces stay as the model wrote them: what transformers cleans up
    depends on the text that follows, so it could not be streamed."""
    text = tokenizer.decode(
        ids, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
    )
    return str(text)


class TokenBytes:
    """The tokens of one tokenizer, made by `token_bytes`. Any thread may ask.

    `special`: tokens that the text of an answer leaves out.
    `fallback`: the byte that each byte token of a byte-fallback tokenizer stands for.
    `exact`: whether each token always adds `of(token)`, as byte-level and byte-fallback tokenizers
    have it. With others what a token adds may depend on those beside it.
    `apart`: whether whole characters decoded apart give the text when joined, with nothing done to
    its start, as purely byte-level tokenizers have it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = proxy(tokenizer)
        self._known: dict[int, bytes] = {}
        added = {i for name in SPECIAL for i in getattr(tokenizer, name, ())}
        self.special = frozenset(filter(self._is_left_out, added))
        self.fallback = self._byte_tokens()
        decoder = _decoder_of(tokenizer)
        self.exact = bool(self.fallback) or '"ByteLevel"' in decoder
        self.apart = decoder.startswith('{"type":"ByteLevel"')

    def of(self, token: int) -> bytes:
        """The bytes that a token adds within a text, a leading space included; its name if it is
        special."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._bytes_of(token)
        return known

    def spelled(self, token: int) -> Any:
        """A token as the vocabulary spells it; None where it has no such token."""
        return self._tokenizer.convert_ids_to_tokens(token)

    def _bytes_of(self, token: int) -> bytes:
        if token in self.fallback:
            return bytes([self.fallback[token]])
        # Twice, since some tokenizers drop the space at the start of a text.
        once, twice = self._text([token]), self._text([token, token])
        if UNFINISHED not in once:
            return (twice[len(once) :] if twice.startswith(once) else once).encode()
        spelled = self.spelled(token)
        if isinstance(spelled, str) and ALPHABET.keys() >= set(spelled):
            return bytes(ALPHABET[letter] for letter in spelled)
        return once.encode()

    def _text(self, ids: Sequence[int]) -> str:
        return decoded(self._tokenizer, ids, keep_special=True)

    def _is_left_out(self, token: int) -> bool:
        return self._text([token]) != decoded(self._tokenizer, [token], keep_special=False)

    def _byte_tokens(self) -> dict[int, int]:
        """<0x00> to <0xFF>, unless the tokenizer prints them as they are spelled."""
        tokens = {}
        for byte in range(256):
            for spelled in (f"<0x{byte:02X}>", f"<0x{byte:02x}>"):
                token = self._tokenizer.convert_tokens_to_ids(spelled)
                if token is not None and self.spelled(token) == spelled:
                    tokens[token] = byte
        prints_spelled = any(self._text([token]).startswith("<0x") for token in tokens)
        return {} if prints_spelled else tokens


SPECIAL = ("all_special_ids", "added_tokens_decoder")  # where tokenizers have special tokens


def _decoder_of(tokenizer: Any) -> str:
    """A fast tokenizer's decoder as JSON. One written in Python has none."""
    try:
        return bytes(tokenizer.backend_tokenizer.decoder.__getstate__()).decode()
    except Exception:
        return ""


_known: "WeakKeyDictionary[Any, TokenBytes]" = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> TokenBytes:
    """The TokenBytes of a tokenizer, made once for each."""
    known = _known.get(tokenizer)
    if known is None:
        known = _known[tokenizer] = TokenBytes(tokenizer)
    return known
