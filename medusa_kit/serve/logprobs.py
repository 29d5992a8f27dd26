"""Log-probabilities of tokens in the two forms that OpenAI's API has for them.

The bytes of each token are those that it adds to the answer where it stands, so that joined bytes
are those of the text. A special token adds none, nor does one that a stop string holds.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from medusa_kit.infer.decode.detokenize import Settled
from medusa_kit.infer.decode.text.prompt_end import decoded_behind, prompt_end
from medusa_kit.infer.decode.text.token_bytes import UNFINISHED, token_bytes
from medusa_kit.infer.details import TokenScore

LEAST = -9999.0  # OpenAI's number for what cannot come; JSON has no -inf


class Named(NamedTuple):
    """A token where it stands. Bytes of a part of a character are UNFINISHED in its name."""

    token: int
    name: str
    added: bytes
    log_prob: float


class Scored(NamedTuple):
    """A token of an answer, and the likeliest ones in its stead, each with a name of its own."""

    chosen: Named
    top_tokens: list[Named]
    offset: int  # of the character that it begins in


class ScoredText:
    """Tokens of one answer as its text settles. `hidden`: those that it leaves out, all special
    ones unless given. `prompt`: the tokens before them."""

    def __init__(
        self,
        tokenizer: Any,
        hidden: frozenset[int] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._bytes = None if tokenizer is None else token_bytes(tokenizer)
        usual = frozenset[int]() if self._bytes is None else self._bytes.special
        self._hidden = usual if hidden is None else hidden
        # The prompt's last tokens, and those so far while they show nothing.
        self._before: list[int] | None = prompt_end(tokenizer, prompt)
        self._size = 0  # characters so far

    def read(self, settled: Settled, scores: Sequence[TokenScore]) -> list[Scored]:
        added_alone, alternatives = [], []
        for token, score in zip(settled.tokens, scores, strict=True):
            added_alone.append(self._added(token))
            alternatives.append([(*named, self._added(named[0])) for named in score.top_tokens])
            self._go_on(token, added_alone[-1])
        added = self._agreed(settled, added_alone)
        names = map(self._name, settled.tokens, added_alone if settled.stopped else added)
        chosen = map(Named, settled.tokens, names, added, [score.log_prob for score in scores])
        offsets = self._offsets(settled, added)
        return [
            Scored(token, self._named(token, others), offset)
            for token, others, offset in zip(chosen, alternatives, offsets, strict=True)
        ]

    def _added(self, token: int) -> bytes:
        """The bytes that a token adds next. Some tokenizers drop the space at the start of a
        text."""
        if self._bytes is None or token in self._hidden:
            return b""
        added = self._bytes.of(token)
        if self._before is None:
            return added
        text = decoded_behind(self._tokenizer, self._before, [token], keep_special=True)
        return added if UNFINISHED in text else text.encode()

    def _go_on(self, token: int, added: bytes) -> None:
        if added or self._bytes is None:
            self._before = None
        elif self._before is not None and token not in self._hidden:
            self._before += [token] if self._bytes.of(token) else []

    def _agreed(self, settled: Settled, added_alone: Sequence[bytes]) -> list[bytes]:
        """What each token adds, as the text has it."""
        added = list(added_alone)
        if settled.cut:
            added[-1] = added[-1].removesuffix(settled.cut)
        if UNFINISHED in settled.text or b"".join(added) == settled.text.encode():
            return added
        # The tokenizer joins these in a way of its own.
        return [b""] * (len(added) - 1) + [settled.text.encode()]

    def _offsets(self, settled: Settled, added: Sequence[bytes]) -> list[int]:
        start, self._size = self._size, self._size + len(settled.text)
        if b"".join(added).decode(errors="replace") == settled.text:
            return [start + offset for offset in _beginnings(added)]
        # A broken run of byte tokens, each of which is shown as a character.
        sizes = [len(data.decode(errors="replace")) for data in added]
        begins = accumulate(sizes[:-1], initial=0)
        return [start + min(offset, len(settled.text)) for offset in begins]

    def _named(self, chosen: Named, others: Sequence[tuple[int, float, bytes]]) -> list[Named]:
        """The likeliest tokens in the place of the chosen one, with names."""
        taken, top_tokens = {chosen.name: chosen.token}, []
        for other, log_prob, added in others:
            if other == chosen.token:
                top_tokens.append(chosen._replace(log_prob=log_prob))
                continue
            name = self._unique_name(other, added, taken)
            top_tokens.append(Named(other, name, added, log_prob))
        return top_tokens

    def _unique_name(self, token: int, added: bytes, taken: dict[str, int]) -> str:
        """A name that no other token has: the vocabulary's word where its text is no character, or
        is another's too."""
        text = self._name(token, added)
        word = text if self._bytes is None else str(self._bytes.spelled(token))
        names = [word] if UNFINISHED in text else [text, word]
        free = (name for name in names if taken.setdefault(name, token) == token)
        return next(free, f"token_id:{token}")

    def _name(self, token: int, added: bytes) -> str:
        if self._bytes is None:
            return str(token)
        hidden = token in self._hidden
        return (self._bytes.of(token) if hidden else added).decode(errors="replace")


def _beginnings(added: Sequence[bytes]) -> Iterator[int]:
    """For each part of a text: the character that its first byte is in."""
    decoder, size = getincrementaldecoder("utf-8")("replace"), 0
    for data in added:
        size += len(decoder.decode(data[:1]))
        inside = bool(decoder.getstate()[0])  # the character goes on
        yield size if inside or not data else size - 1
        size += len(decoder.decode(data[1:]))


def token_logprobs(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """Log-probabilities of a chat: an object for each token."""
    return [
        {**_entry(token.chosen), "top_logprobs": [_entry(other) for other in token.top_tokens]}
        for token in scored
    ]


def completion_logprobs(scored: Sequence[Scored], num_top_tokens: int) -> dict[str, Any]:
    """Log-probabilities of a completion: a list for each property. The chosen token is always among
    the likeliest ones; where none of these are requested, they are null."""
    likeliest = [{one.name: _finite(one.log_prob) for one in _with_chosen(it)} for it in scored]
    return {
        "tokens": [token.chosen.name for token in scored],
        "token_logprobs": [_finite(token.chosen.log_prob) for token in scored],
        "top_logprobs": likeliest if num_top_tokens else None,
        "text_offset": [token.offset for token in scored],
    }


def _with_chosen(token: Scored) -> list[Named]:
    is_there = any(other.token == token.chosen.token for other in token.top_tokens)
    return [*token.top_tokens, *([] if is_there else [token.chosen])]


def text_of_token(tokenizer: Any, token: int) -> str:
    return str(token) if tokenizer is None else str(tokenizer.decode([token]))


def _entry(token: Named) -> dict[str, Any]:
    return {"token": token.name, "logprob": _finite(token.log_prob), "bytes": list(token.added)}


def _finite(log_prob: float) -> float:
    return max(LEAST, log_prob)
