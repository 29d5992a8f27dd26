"""The likeliest tokens, of scores that are numbers: with NaN or infinite ones no token follows.

No row is searched for NaN: torch's argmax takes it for the highest score, so the highest one tells.

Shapes: N nodes, V vocabulary.
"""

import numpy as np
from torch import Tensor

from medusa_kit.errors import NotFiniteError

NO_TOKEN = -1  # in place of the likeliest token


def likeliest(logits_NV: Tensor, tokens_N: Tensor | None = None) -> Tensor:
    """The token of the highest score of each row [N], or NO_TOKEN. `tokens_N`: where they are
    known. The host does not wait for a device."""
    tokens_N = logits_NV.argmax(-1) if tokens_N is None else tokens_N
    best_N = logits_NV.gather(-1, tokens_N[:, None])[:, 0]
    return tokens_N.masked_fill(best_N - best_N != 0, NO_TOKEN)  # NaN less itself, and infinity


def likeliest_of(logits_NV: Tensor, tokens: list[int]) -> list[int]:
    """The same of known tokens, in the host's memory, where numpy takes less time for few numbers
    than torch."""
    finite_N = np.isfinite(logits_NV.numpy()[np.arange(len(tokens)), tokens])
    if finite_N.all():
        return tokens
    return [token if known else NO_TOKEN for token, known in zip(tokens, finite_N, strict=True)]


def no_scores(count: int) -> NotFiniteError:
    """The error of a request whose text has `count` tokens, the last of which has no scores."""
    return NotFiniteError(
        f"no token can follow the first {count} of the text: the scores that the model gives are "
        "NaN or infinite, expected finite numbers",
        hint="some of its weights are damaged, or its dtype is too narrow for this text: copy the "
        "checkpoint again, or load it in a wider dtype (--dtype bfloat16 or float32)",
    )
