"""What a request may have reported of its steps besides their tokens.

Shapes: K emitted tokens, V vocabulary, R likeliest tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class OutputOptions(NamedTuple):
    """What is reported of each step. `num_top_tokens`: log-probabilities of each token and of so
    many others; None: of none. `tree`: the trees that were verified."""

    num_top_tokens: int | None = None
    tree: bool = False


class TokenScore(NamedTuple):
    """The base model's own log-probability of a token, before any processing, and the likeliest
    tokens at its position with theirs."""

    log_prob: float
    top_tokens: list[tuple[int, float]]


class VerifiedTree(NamedTuple):
    """A step's tree: node 0 is the root, `accepted` are the other nodes that were kept."""

    parents: list[int]
    tokens: list[int]
    accepted: list[int]


NOTHING = OutputOptions()


def token_scores(logits_KV: Tensor, tokens: Sequence[int], num_top_tokens: int) -> list[TokenScore]:
    """The scores of tokens that were chosen where the base model gave these logits."""
    log_KV = logits_KV[: len(tokens)].float().log_softmax(-1)
    chosen_K1 = torch.tensor(tokens, device=log_KV.device)[:, None]
    log_probs_K = log_KV.gather(1, chosen_K1)[:, 0].tolist()
    best_KR = log_KV.topk(min(num_top_tokens, log_KV.shape[1]))
    pairs = zip(best_KR.indices.tolist(), best_KR.values.tolist(), strict=True)
    top_tokens = [list(zip(ids, scores, strict=True)) for ids, scores in pairs]
    return [TokenScore(*score) for score in zip(log_probs_K, top_tokens, strict=True)]
