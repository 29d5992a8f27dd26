"""From tokens to text as they come: whole characters only, and stop strings.

By hand, since `tokenizers.decoders.DecodeStream` has no way to ask for what is still waiting at the
end, shows text of byte-fallback tokenizers that later bytes change (or raises), and takes fast
tokenizers only.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.text.byte_search import ByteSearch
from medusa_kit.infer.decode.text.heard import Heard, ThoughtMarks
from medusa_kit.infer.decode.text.prompt_end import added_text, decoded_behind, prompt_end
from medusa_kit.infer.decode.text.token_bytes import UNFINISHED, decoded, token_bytes

FEW = 4  # tokens that a character takes at most


def text_of(
    tokenizer: Any, ids: Sequence[int], keep_special: bool = False, prompt: Sequence[int] = ()
) -> str:
    """The text that an answer's tokens add to their prompt's, without special tokens unless these
    are kept. A base without tokenizer has none."""
    if tokenizer is None:
        return ""
    return decoded_behind(tokenizer, prompt_end(tokenizer, prompt), ids, keep_special)


class Detokenizer:
    """Turns tokens into text one at a time.

    Text that further tokens could change waits for them: bytes of an unfinished character, and
    runs of byte-fallback tokens, which are decoded as a whole. All pieces together are `text_of`
    all tokens. The time it takes is linear in their number. `prompt`: what goes before them;
    `amid_text`: where that is not known, the first token is read as if text went before it.
    """

    def __init__(
        self,
        tokenizer: Any,
        keep_special: bool = False,
        amid_text: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._keep_special = tokenizer, keep_special
        self._bytes = None if tokenizer is None else token_bytes(tokenizer)
        # Decoding starts a little before the new tokens, since some tokenizers print a token
        # differently at the start of a text.
        self._ids = prompt_end(tokenizer, prompt)  # that little, then those whose text waits
        self._shown = len(self._ids)  # how many of them are that little
        self._before: str | None = None if self._ids else ""  # its text, once it is needed
        self._amid_text = amid_text
        self.num_waiting = 0  # tokens pushed whose text has not been returned

    def push(self, token: int) -> str:
        """The text that this token completes, often one word, sometimes none."""
        if self._bytes is None:
            return ""
        if self._is_left_out(token):
            self.num_waiting += self.num_waiting > 0
            return ""
        if self._amid_text and not self._ids:
            self._ids, self._shown, self._before = [token], 1, None
        self._ids.append(token)
        self.num_waiting += 1
        return "" if self._is_amid(token) else self._advance(final=False)

    def finish(self) -> str:
        """What is still waiting, unfinished characters included."""
        return self._advance(final=True)

    def _is_left_out(self, token: int) -> bool:
        """Whether decoding passes over it: it does not even end a run of byte tokens."""
        assert self._bytes is not None
        if token in self._bytes.special:
            return not self._keep_special
        in_run = bool(self._ids) and self._ids[-1] in self._bytes.fallback
        return in_run and self._bytes.spelled(token) is None

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
        if self._before is None:
            self._before = self._text(self._ids[: self._shown])
        after = self._text(self._ids)
        added = added_text(self._before, after)
        if not final and (not added or after.endswith(UNFINISHED)):
            return ""
        self._go_on()
        return added

    def _go_on(self) -> None:
        """Start anew behind the tokens whose text has been returned."""
        apart = self._bytes is None or self._bytes.apart
        self._ids = [] if apart else self._ids[self._shown :]
        self._shown, self._before = len(self._ids), None if self._ids else ""
        self.num_waiting = 0

    def _text(self, ids: Sequence[int]) -> str:
        return "" if self._tokenizer is None else decoded(self._tokenizer, ids, self._keep_special)


class StopPosition(NamedTuple):
    """Where the first stop string begins: after `num_tokens` tokens, less `cut`, the end of what
    the last of them adds."""

    num_tokens: int
    cut: bytes = b""


class StopStrings:
    """Searches an answer for stop strings, token by token. Whoever shows the answer cuts it at
    `position`.

    A stop string is found at the token that completes it, as by transformers' `stop_strings`,
    whatever the display still waits for. The text watched has special tokens in it, whether or not
    the text shown has. `thoughts`: before the words of the answer, in which nothing is searched.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], thoughts: ThoughtMarks | None = None
    ) -> None:
        if tokenizer is None:
            raise ConfigError(
                f"the stop string {stops[0]!r} needs a tokenizer, and this base model has none",
                hint="leave it out",
            )
        known = token_bytes(tokenizer)
        self._bytes_of: Callable[[int], bytes] = known.of
        self._exact = known.exact and not any(UNFINISHED in stop for stop in stops)
        if not self._exact:
            detokenizer = Detokenizer(tokenizer, keep_special=True, amid_text=not known.exact)
            self._bytes_of = lambda token: detokenizer.push(token).encode()
        self._search = ByteSearch([stop.encode() for stop in stops])
        self._added: list[bytes] = []  # by each token
        self._begins: list[int] = []  # where that begins
        self._size = 0  # of all that was added
        self._heard = None if thoughts is None else Heard(thoughts)
        self.position: StopPosition | None = None

    def push(self, token: int) -> bool:
        """Whether a stop string is complete with this token, or was before."""
        if self.position is None:
            added = self._bytes_of(token)
            self._begins.append(self._size)
            self._added.append(added)
            self._size += len(added)
            start = self._search.push(added if self._heard is None else self._heard.push(added))
            self.position = None if start is None else self._position_of(start)
        return self.position is not None

    @property
    def num_free(self) -> int:
        """How many tokens end before the position at which a stop string may have begun."""
        waiting = 0 if self._heard is None else self._heard.num_waiting
        begun = max(self._search.begun, waiting)
        return self._token_at(self._size - begun) if begun else len(self._added)

    def _token_at(self, byte: int) -> int:
        return bisect_right(self._begins, byte) - 1

    def _position_of(self, start: int) -> StopPosition:
        start += self._size - self._search.size  # thoughts before the words
        token = self._token_at(start)
        cut = self._added[token][start - self._begins[token] :]
        whole = self._exact and cut == self._added[token]
        return StopPosition(token) if whole else StopPosition(token + 1, cut)


def text_before(
    tokenizer: Any,
    ids: Sequence[int],
    position: StopPosition | None,
    keep_special: bool = False,
    prompt: Sequence[int] = (),
) -> str:
    """The text of an answer's tokens, up to where a stop string was found."""
    if position is None:
        return text_of(tokenizer, ids, keep_special, prompt)
    ids = ids[: position.num_tokens]
    text = text_of(tokenizer, ids, keep_special, prompt)
    if position.cut and (keep_special or ids[-1] not in token_bytes(tokenizer).special):
        text = _without(text, position.cut)
    return text


def _without(text: str, end: bytes) -> str:
    return text[: max(0, len(text) - len(end.decode(errors="replace")))]


class Settled(NamedTuple):
    """Tokens of an answer and their text, which no further token changes. `cut`: the end of what
    the last of them adds, which belongs to a stop string and not to the text; `stopped`: all that
    they add does."""

    tokens: list[int]
    text: str
    cut: bytes = b""
    stopped: bool = False


class TextStream:
    """Text for a reader as it comes, what it adds to its prompt's, up to the first stop string
    behind any thoughts. Tokens in which a stop string may have begun are held back."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        keep_special: bool = False,
        prompt: Sequence[int] = (),
        thoughts: ThoughtMarks | None = None,
    ) -> None:
        self._tokenizer, self._keep_special = tokenizer, keep_special
        self._detokenizer = Detokenizer(tokenizer, keep_special, prompt=prompt)
        self._stops = StopStrings(tokenizer, stops, thoughts) if stops else None
        self._unreleased: list[int] = []
        self._released = 0  # tokens that are held no more
        self._waiting: list[int] = []  # of these, those whose text waits
        self._closed = False

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(settled.text for settled in self.settle(tokens))

    def finish(self) -> str:
        return "".join(settled.text for settled in self.settle_all())

    def settle(self, tokens: Sequence[int]) -> list[Settled]:
        """What these tokens settle, in order."""
        if self._closed:
            return []
        for token in tokens:
            self._unreleased.append(token)
            if self._stops is not None and self._stops.push(token):
                return self.settle_all()
        end = None if self._stops is None else self._stops.num_free
        return self._release(end)

    def settle_all(self) -> list[Settled]:
        """What remains at the end of the answer."""
        if self._closed:
            return []
        self._closed = True
        position = None if self._stops is None else self._stops.position
        settled = self._release(None if position is None else position.num_tokens)
        if self._waiting:
            settled.append(Settled(self._waiting, self._detokenizer.finish()))
        if position is not None and position.cut:
            settled[-1] = self._cut(settled[-1], position.cut)
        if self._unreleased:
            settled.append(Settled(self._unreleased, "", stopped=True))
        return settled

    def _release(self, end: int | None) -> list[Settled]:
        """Settle the tokens before number `end`, or all."""
        count = len(self._unreleased) if end is None else end - self._released
        settled = []
        for token in self._unreleased[:count]:
            self._waiting.append(token)
            text = self._detokenizer.push(token)
            if not self._detokenizer.num_waiting:
                settled.append(Settled(self._waiting, text))
                self._waiting = []
        del self._unreleased[:count]
        self._released += count
        return settled

    def _cut(self, last: Settled, cut: bytes) -> Settled:
        special = token_bytes(self._tokenizer).special
        if last.tokens[-1] in special and not self._keep_special:
            return last
        return Settled(last.tokens, _without(last.text, cut), cut)
