"""One row's text in the ids of a draft model, kept up with as it grows, and back.

With another tokenizer text is read anew from a little before its end, since new text may change
how the last words are cut; what lies further back is settled. A seam that cuts a word otherwise
than the tokenizer would costs a guess, nothing else.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from medusa_kit.drafters.draft_model.shared_vocabulary import Vocabulary
from medusa_kit.infer.detokenize import UNFINISHED

LOOK_BACK = 16  # tokens that are read anew at least
LONGEST_TAIL = 48  # from here on a place to settle at is looked for
TRIES = 8  # places tried
BEHIND = 8  # tokens that lead up to what is translated back


class Reader(Protocol):
    def read(self, tokens: Sequence[int]) -> list[int]:
        """The draft's ids of a row's tokens, all of them, which go on from the last call's."""

    def back(self, tokens: Sequence[int], said: Sequence[int], text: Sequence[int]) -> list[int]:
        """Base tokens after `tokens` for the draft's ids `said` after `text`."""


class SameIds:
    """The same tokenizer; a token that the draft model has no row for reads as its token 0."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.draft_size
        self.has_all = vocabulary.draft_size >= vocabulary.base_size

    def read(self, tokens: Sequence[int]) -> list[int]:
        if self.has_all:
            return list(tokens)
        return [token if token < self.size else 0 for token in tokens]

    def back(self, tokens: Sequence[int], said: Sequence[int], text: Sequence[int]) -> list[int]:
        return list(said)


class Retokenized:
    """`base` and `draft`: tokenizers."""

    def __init__(self, base: Any, draft: Any) -> None:
        self.base, self.draft = base, draft
        self._start = [token for token in draft.encode("") if token != draft.eos_token_id]
        self._settled: list[int] = list(self._start)  # the draft's ids of the tokens before `_from`
        self._from = 0
        self._before: list[int] = []  # base tokens read last

    def read(self, tokens: Sequence[int]) -> list[int]:
        tokens = list(tokens)
        if self._before[: self._from] != tokens[: self._from]:
            self._settled, self._from = list(self._start), 0
        self._before = tokens
        begin = self._from
        if begin == 0 and tokens[:1] == [self.base.bos_token_id]:
            begin = 1  # the draft has its own
        tail = tokens[begin:]
        ids = self._encode(self._decode(tail))
        result = [*self._settled, *ids]
        if len(tail) > LONGEST_TAIL:
            self._settle(begin, tail, ids)
        return result

    def back(self, tokens: Sequence[int], said: Sequence[int], text: Sequence[int]) -> list[int]:
        lead = list(text[-BEHIND:])
        before, whole = self.draft.decode(lead), self.draft.decode([*lead, *said])
        if not whole.startswith(before):
            before, whole = "", self.draft.decode(said)
        words = whole.removeprefix(before).rstrip(UNFINISHED)
        if not words:
            return []
        tail = list(tokens[-BEHIND:])
        together = self.base.encode(self._decode(tail) + words, add_special_tokens=False)
        if together[: len(tail)] == tail:
            return list(together[len(tail) :])
        return list(self.base.encode(words, add_special_tokens=False))

    def _settle(self, begin: int, tail: list[int], ids: list[int]) -> None:
        """Move the boundary to where text cut in two is read as it is in one piece."""
        for cut in range(len(tail) - LOOK_BACK, len(tail) - LOOK_BACK - TRIES, -1):
            left, right = (self._encode(self._decode(part)) for part in (tail[:cut], tail[cut:]))
            if left + right == ids or cut == len(tail) - LOOK_BACK - TRIES + 1:
                self._settled += left
                self._from = begin + cut
                return

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.base.decode(tokens, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> list[int]:
        return list(self.draft.encode(text, add_special_tokens=False))
