"""Draft tokens of heads blended with what followed the same tokens earlier in the row's own text.

Heads name what the model usually says; names, numbers and phrases of this text come again as they
were. If the last l tokens of a path stand t times earlier in the text, followed by k different
tokens, n times by this one, a match of that length estimates n / t, and what is shorter the rest:

    P_l(token) = (n + k * smoothing[l] * P_shorter(token)) / (t + k * smoothing[l])

P_0 is the head's own probability. Interpolation after Witten and Bell (1991), with the heads in the
place of the unigram; a cache beside a model: Grave et al. (arXiv 1612.04426). Where heads draft in
C++ they are blended there (infer/cpu/copying.h), by the same arithmetic.

Shapes: T tokens of a row's text, M matching positions in it, C draft tokens of a head, B batch, Q
paths of a row, J tokens of a path.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medusa_kit.heads.guesser import Texts
from medusa_kit.infer.decode.drafter import unread
from medusa_kit.transfer import to_device, together_on_host
from medusa_kit.tree.dynamic import Guesses

# For matches of 1, 2, .. tokens, and longer ones are not told apart; fitted by likelihood to which
# draft tokens of the heads shipped were right in answers of SmolLM2-135M.
SMOOTHING = (15.0, 3.5, 4.5, 1.3)
MAX_MATCHES = 512  # positions in a text that count, the newest ones


class RowText:
    """The tokens of a row, its root last, in an array that grows."""

    def __init__(self) -> None:
        self._tokens, self._length = np.empty(1024, dtype=np.int64), 0

    def read(self, tokens: list[int], root: int) -> np.ndarray:
        """text_T with what is new in `tokens` and the root."""
        new = unread(tokens, root, self._length)
        end = self._length + len(new)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(end, dtype=np.int64)])
        self._tokens[self._length : end] = new
        self._length = end
        return self._tokens[: self._length]


class Followers(NamedTuple):
    """What followed a path's last tokens: how often each token came after at least 1, 2, .. of
    them, how often any did, and how many different ones did."""

    of_token: Mapping[int, list[int]]
    times: list[int]
    kinds: list[int]

    def blended(self, token: int, score: float, smoothing: Sequence[float]) -> float:
        """The log-probability of a token that has this one by the head alone."""
        chance, own = math.exp(score), self.of_token.get(token)
        for i, times in enumerate(self.times):
            if times == 0:
                break
            weight = self.kinds[i] * smoothing[i]
            chance = ((own[i] if own else 0) + weight * chance) / (times + weight)
        return min(math.log(chance), 0.0) if chance > 0 else -math.inf


def followers(text_T: np.ndarray, path: Sequence[int], longest: int) -> Followers:
    """`path`: from the root on, which is the last of the text."""
    before = text_T[: len(text_T) - 1][-longest:].tolist()
    last = [*before, *path][::-1]
    at_M = np.flatnonzero(text_T[:-1] == last[0])[-MAX_MATCHES:]
    matched_M, same_M = np.ones_like(at_M), np.ones(len(at_M), dtype=bool)
    for back in range(1, min(longest, len(last))):
        same_M &= at_M >= back
        same_M &= text_T[np.maximum(at_M - back, 0)] == last[back]
        matched_M += same_M
    of_token: dict[int, list[int]] = {}
    for token, matched in zip(text_T[at_M + 1].tolist(), matched_M.tolist(), strict=True):
        own = of_token.setdefault(token, [0] * longest)
        for i in range(matched):
            own[i] += 1
    times = [sum(own[i] for own in of_token.values()) for i in range(longest)]
    kinds = [sum(own[i] > 0 for own in of_token.values()) for i in range(longest)]
    return Followers(dict(sorted(of_token.items())), times, kinds)


def with_copies(
    guesses: Guesses, text_T: np.ndarray, path: Sequence[int], smoothing: Sequence[float]
) -> Guesses:
    """A head's draft tokens after the path with their blended chances, in their order; after them
    the likeliest followers that are not among them, as many at most."""
    found = followers(text_T, path, len(smoothing))
    blended = [(token, found.blended(token, score, smoothing)) for token, score in guesses]
    named = {token for token, _ in guesses}
    more = [(token, found.blended(token, -math.inf, smoothing))
            for token in found.of_token if token not in named]  # fmt: skip
    return [*blended, *sorted(more, key=lambda one: -one[1])[: len(guesses)]]


def with_copies_after(
    ids_BQC: Tensor,
    scores_BQC: Tensor,
    texts: Texts,
    paths_BQJ: Tensor,
    smoothing: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """The same after several paths of each row: (ids, scores) of 2 * C draft tokens, those that
    are not there with a score of minus infinity. A text of None is not copied from."""
    (B, Q, C), device = ids_BQC.shape, ids_BQC.device
    ids_BQC, scores_BQC, paths_BQJ = together_on_host(ids_BQC, scores_BQC, paths_BQJ)
    ids = torch.zeros(B, Q, 2 * C, dtype=ids_BQC.dtype)
    scores = torch.full(ids.shape, -math.inf, dtype=scores_BQC.dtype)
    rows = zip(ids_BQC.tolist(), scores_BQC.tolist(), paths_BQJ.tolist(), texts, strict=True)
    for row, (ids_QC, scores_QC, paths_QJ, text_T) in enumerate(rows):
        for at, (tokens, own, path) in enumerate(zip(ids_QC, scores_QC, paths_QJ, strict=True)):
            guesses: Guesses = list(zip(tokens, own, strict=True))
            if text_T is not None:
                guesses = with_copies(guesses, text_T, path, smoothing)
            ids[row, at, : len(guesses)] = torch.tensor([token for token, _ in guesses])
            scores[row, at, : len(guesses)] = torch.tensor(
                [score for _, score in guesses], dtype=scores.dtype
            )
    return to_device(ids, device), to_device(scores, device)
