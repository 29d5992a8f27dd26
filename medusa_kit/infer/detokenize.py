"""From tokens to text as they come: whole characters only, and stop strings.

By hand, since `tokenizers.decoders.DecodeStream` has no way to ask for what is still waiting at the
end, shows text of byte-fallback tokenizers that later bytes change (or raises), and takes fast
tokenizers only.
"""

from collections.abc import Sequence
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.infer.token_bytes import UNFINISHED, decoded, token_bytes

FEW = 4  # tokens that a character takes at most


def text_of(tokenizer: Any, ids: Sequence[int], keep_special: bool = False) -> str:
    """The text of an answer's tokens, without special tokens unless these are kept. A base without
    tokenizer has none."""
    return "" if tokenizer is None else decoded(tokenizer, ids, keep_special)


class Detokenizer:
    """Turns tokens into text one at a time.

    Text that further tokens could change waits for them: bytes of an unfinished character, and
    runs of byte-fallback tokens, which are decoded as a whole. All pieces together are `text_of`
    all tokens. The time it takes is linear in their number.
    """

    def __init__(self, tokenizer: Any, keep_special: bool = False) -> None:
        self._tokenizer, self._keep_special = tokenizer, keep_special
        self._bytes = None if tokenizer is None else token_bytes(tokenizer)
        # Decoding starts a little before the new tokens, since some tokenizers print a token
        # differently at the start of a text.
        self._ids: list[int] = []  # that little, then those whose text waits
        self._shown = 0  # how many of them are that little
        self.num_waiting = 0  # tokens pushed whose text has not been returned

    def push(self, token: int) -> str:
        """The text that this token completes, often one word, sometimes none."""
        if self._bytes is None:
            return ""
        if token in self._bytes.special and not self._keep_special:
            self.num_waiting += self.num_waiting > 0
            return ""
        self._ids.append(token)
        self.num_waiting += 1
        return "" if self._is_amid(token) else self._advance(final=False)

    def finish(self) -> str:
        """What is still waiting, unfinished characters included."""
        return self._advance(final=True)

    def _is_amid(self, token: int) -> bool:
        """Whether it can be told from the last tokens alone that the text has to wait."""
        assert self._bytes is not None
        if token in self._bytes.fallback:
            return True
        if len(self._ids) - self._shown <= FEW:
            return False
        end = self._text(self._ids[-FEW:])
        return not end or end.endswith(UNFINISHED)

    def _advance(self, final: bool) -> str:
        before, after = self._text(self._ids[: self._shown]), self._text(self._ids)
        waits = len(after) <= len(before) or after.endswith(UNFINISHED)
        if waits and not final:
            return ""
        del self._ids[: self._shown]
        self._shown, self.num_waiting = len(self._ids), 0
        return after[len(before) :]

    def _text(self, ids: Sequence[int]) -> str:
        return text_of(self._tokenizer, ids, self._keep_special)


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

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), keep_special: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, keep_special)
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
