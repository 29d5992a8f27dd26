"""Where free text ends and a grammar begins, in an answer that may go back and on."""

from collections.abc import Callable, Sequence

from medusa_kit.infer.decode.grammars.tokens import GrammarTokens
from medusa_kit.settings.grammar import Free


class FreeText:
    """Finds where free text ends in one request's answer, whose last text it keeps. `fits`: whether
    the grammar can begin with these tokens."""

    def __init__(
        self, free: Free, tokens: GrammarTokens, fits: Callable[[list[int]], bool]
    ) -> None:
        self._free, self._tokens, self._fits = free, tokens, fits
        self._tag = free.tag.encode()
        self._seen: list[int] = []
        self._text = b""
        self._sizes = [0]  # of the text after each token
        self._begun: list[int] | None = None  # what of the last token seen is the grammar's

    def behind(self, answer: list[int]) -> list[int] | None:
        """The tokens of `answer` that the grammar has to allow; None where all of it is free."""
        same = num_shared(self._seen, answer)
        if same < len(self._seen):
            self._begun = None
            del self._seen[same:], self._sizes[same + 1 :]
            self._text = self._text[: self._sizes[-1]]
        while self._begun is None and len(self._seen) < len(answer):
            self._push(answer[len(self._seen)])
        return None if self._begun is None else [*self._begun, *answer[len(self._seen) :]]

    def _push(self, token: int) -> None:
        self._seen.append(token)
        self._text += self._tokens.bytes_of(token)
        new = max(self._start(), self._sizes[-1] - len(self._tag) + 1, 0)
        self._sizes.append(len(self._text))
        start = self._text.find(self._tag, new)
        if start < 0 or (self._free.first and self._text[self._start() : start].strip()):
            return
        # The token that ends the tag may say more. Where no call begins so, it is no call's tag.
        behind = self._tokens(self._text[start + len(self._tag) :])
        if self._fits(behind):
            self._begun = behind

    def _start(self) -> int:
        """The position in the text from which on a tag counts."""
        if self._free.reasoning is None:
            return 0
        opening, closing = (tag.encode() for tag in self._free.reasoning)
        if not self._free.opened and not self._text.lstrip().startswith(opening):
            return 0
        end = self._text.find(closing)
        return len(self._text) if end < 0 else end + len(closing)


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(n for n in range(length) if first[n] != second[n])
