"""From tokens to text as they come: whole characters only, and stop strings.

By hand, since `tokenizers.decoders.DecodeStream` has no way to ask for what is still waiting at the
end, shows text of byte-fallback tokenizers that later bytes change (or raises), and takes fast
tokenizers only.
"""

from collections.abc import Sequence
from typing import Any

from medusa_kit.errors import ConfigError

UNFINISHED = "\ufffd"  # what a tokenizer prints for bytes that are no character yet
# Byte-fallback tokenizers (SentencePiece) have a token for each byte. A run of them is decoded as
# a whole: this byte, part of no character, turns every character of the run into UNFINISHED.
SPOILING_BYTE = "<0xFF>"


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of an answer's tokens, without special tokens. A base without tokenizer has none.

    Spaces stay as the model wrote them: what transformers cleans up depends on the text that
    follows, so it could not be streamed.
    """
    if tokenizer is None:
        return ""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Detokenizer:
    """Turns tokens into text one at a time.

    Text that further tokens could change waits for them: bytes of an unfinished character, and
    runs of byte-fallback tokens. All pieces together are `text_of` all tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Decoding starts a little before the new tokens, since some tokenizers print a token
        # differently at the start of a text.
        self._start = self._shown = 0
        self._spoiling = _spoiling_ids(tokenizer)

    def push(self, token: int) -> str:
        """The text that this token completes, often one word, sometimes none."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What is still waiting, unfinished characters included."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = text_of(self._tokenizer, self._ids[self._start : self._shown])
        after = text_of(self._tokenizer, self._ids[self._start :])
        if len(after) <= len(before) or not (final or self._settled(after)):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def _settled(self, text: str) -> bool:
        """Whether no further token can change this text of the last tokens."""
        if text.endswith(UNFINISHED):
            return False
        if not self._spoiling:
            return True
        spoiled = text_of(self._tokenizer, [*self._ids[self._start :], *self._spoiling])
        return spoiled.startswith(text)


def _spoiling_ids(tokenizer: Any) -> list[int]:
    """The token SPOILING_BYTE, where the tokenizer falls back to bytes."""
    if tokenizer is None:
        return []
    token = tokenizer.convert_tokens_to_ids(SPOILING_BYTE)
    known = token is not None and tokenizer.convert_ids_to_tokens(token) == SPOILING_BYTE
    return [token] if known else []


class StopStrings:
    """Watches a row's text for stop strings, token by token, so that every tree cuts alike."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        if tokenizer is None:
            raise ConfigError(
                f"the stop string {stops[0]!r} needs a tokenizer, and this base model has none",
                hint="leave it out",
            )
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = tuple(stops)
        self._reach = max(len(stop) for stop in stops)
        self._text = ""

    def push(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        piece = self._detokenizer.push(token)
        self._text += piece
        tail = self._text[-(len(piece) + self._reach) :]
        return bool(piece) and any(stop in tail for stop in self._stops)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


class TextStream:
    """Pieces of text for a reader; what may turn out to begin a stop string is held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = tuple(stops)
        self._held = ""
        self._closed = False

    def push(self, tokens: Sequence[int]) -> str:
        self._held += "".join(self._detokenizer.push(token) for token in tokens)
        return self._release(0 if not self._stops else self._longest_beginning())

    def finish(self) -> str:
        self._held += self._detokenizer.finish()
        return self._release(0)

    def _release(self, keep: int) -> str:
        if self._closed:
            return ""
        text = cut_at_stop(self._held, self._stops)
        if len(text) < len(self._held):
            self._closed = True
            return text
        split = len(text) - keep
        self._held = text[split:]
        return text[:split]

    def _longest_beginning(self) -> int:
        """How many characters at the end are the beginning of some stop string."""
        for size in range(min(len(self._held), max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
