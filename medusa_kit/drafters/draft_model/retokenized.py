"""One row's text in the ids of a draft model, updated as it grows, and back.

With another tokenizer the end of the text is tokenized again each time, since new text may change
how the last words are split; text further back is settled. Where the boundary splits a word
otherwise than the tokenizer would, it costs a draft token and nothing else.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Protocol

from medusa_kit.drafters.draft_model.shared_vocabulary import Vocabulary
from medusa_kit.infer.decode.text.token_bytes import UNFINISHED

LOOK_BACK = 16  # the fewest tokens that are tokenized again
LONGEST_TAIL = 48  # beyond it a new boundary is looked for
TRIES = 8  # boundaries tried
LEAD = 8  # tokens of context for translating back


class Reader(Protocol):
    def read(self, tokens: Sequence[int]) -> list[int]:
        """The draft's ids of all tokens of a row; `tokens` extends those of the last call."""

    def back(self, tokens: Sequence[int], drafted: Sequence[int], text: Sequence[int]) -> list[int]:
        """The base's tokens after `tokens`, for the draft's ids `drafted` after its ids `text`."""


class SameIds:
    """For the same tokenizer; a token that the draft model has no row for is read as token 0."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.draft_size
        self.has_all = vocabulary.draft_size >= vocabulary.base_size

    def read(self, tokens: Sequence[int]) -> list[int]:
        if self.has_all:
            return list(tokens)
        return [token if token < self.size else 0 for token in tokens]

    def back(self, tokens: Sequence[int], drafted: Sequence[int], text: Sequence[int]) -> list[int]:
        return list(drafted)


class Retokenized:
    """For two tokenizers, `base` and `draft`, whose models have so many rows. A token without a row
    is read as token 0 of the draft, and ends what is proposed to the base."""

    def __init__(self, base: Any, draft: Any, base_rows: int, draft_rows: int) -> None:
        self.base, self.draft = base, draft
        self.base_rows, self.draft_rows = base_rows, draft_rows
        self._start = [token for token in draft.encode("") if token != draft.eos_token_id]
        self._settled: list[int] = list(self._start)  # the draft's ids of the tokens before `_from`
        self._from = 0
        self._before: list[int] = []  # base tokens of the last call

    def read(self, tokens: Sequence[int]) -> list[int]:
        tokens = list(tokens)
        if self._before[: self._from] != tokens[: self._from]:
            self._settled, self._from = list(self._start), 0
        self._before = tokens
        begin = self._from
        if begin == 0 and tokens[:1] == [self.base.bos_token_id]:
            begin = 1  # the draft has a BOS token of its own
        tail = tokens[begin:]
        ids = self._encode(self._decode(tail))
        result = [*self._settled, *ids]
        if len(tail) > LONGEST_TAIL:
            self._settle(begin, tail, ids)
        return result

    def back(self, tokens: Sequence[int], drafted: Sequence[int], text: Sequence[int]) -> list[int]:
        lead = list(text[-LEAD:])
        before, whole = self.draft.decode(lead), self.draft.decode([*lead, *drafted])
        if not whole.startswith(before):
            before, whole = "", self.draft.decode(drafted)
        words = whole.removeprefix(before).rstrip(UNFINISHED)
        if not words:
            return []
        tail = list(tokens[-LEAD:])
        together = self.base.encode(self._decode(tail) + words, add_special_tokens=False)
        new = together[len(tail) :]
        if together[: len(tail)] != tail:
            new = self.base.encode(words, add_special_tokens=False)
        return list(takewhile(lambda token: token < self.base_rows, new))

    def _settle(self, begin: int, tail: list[int], ids: list[int]) -> None:
        """Move the boundary to a place where both parts tokenize as the whole text does."""
        for cut in range(len(tail) - LOOK_BACK, len(tail) - LOOK_BACK - TRIES, -1):
            left, right = (self._encode(self._decode(part)) for part in (tail[:cut], tail[cut:]))
            if left + right == ids or cut == len(tail) - LOOK_BACK - TRIES + 1:
                self._settled += left
                self._from = begin + cut
                return

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.base.decode(tokens, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> list[int]:
        ids = self.draft.encode(text, add_special_tokens=False)
        return [token if token < self.draft_rows else 0 for token in ids]
