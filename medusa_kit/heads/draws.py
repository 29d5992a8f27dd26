"""Draft tokens of tokens that will be drawn, not named by argmax.

A token is drawn as the argmax of the base's scores plus noise that follows from seed, position and
token alone (noise.py). So the noise ahead is known, and a head's best draft token is what it picks
from the head's own distribution. Which draft tokens are made does not change what is drawn.

The chance of a draft token with logit h and noise g is its share of exp((h + s T g) / t) over all
tokens: T is the request's temperature, s is SHARPER, and t the head's own temperature, by which its
chances are those of greedy draft tokens (tuning/temperature.py). So they are these where T is near
0.

Top-k, top-p and min-p are left to the base: heads' distributions are wider than its own, and the
tokens that would be cut from them are not those that are cut from it (measured).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medusa_kit.heads.noise import MASK_64, mixed, mixed_all

# A head's distribution is a mean over what the base may say, and wider than what it does say. The
# noise picks the base's token most often from it at this share of the temperature (measured).
SHARPER = 0.7
AMONG = 8  # tokens at least whose noise counts for the chances of draft tokens


class RowDraws(NamedTuple):
    """How the tokens after a row's root will be drawn. `first`: the position of the first."""

    temperature: float
    seed: int
    first: int

    @property
    def heat(self) -> float:
        """What heads' logits are divided by."""
        return SHARPER * self.temperature

    def noise_seed(self, k: int) -> int:
        """The seed of the noise of the token that head k drafts, 64 bits."""
        return mixed(self.seed, self.first + k)


RowsDraws = Sequence[RowDraws | None]  # of each row; None: its tokens are not drawn


def noise_seeds(draws_B: Sequence[RowDraws], heads: Sequence[int]) -> NDArray[np.uint64]:
    """`noise_seed` of these heads of each row [K, B]."""
    if len(draws_B) == 1:  # numpy takes longer for few
        return np.array([[draws_B[0].noise_seed(k)] for k in heads], np.uint64)
    seeds = np.array([own.seed & MASK_64 for own in draws_B], np.uint64)
    first = np.array([own.first for own in draws_B], np.uint64)
    return mixed_all(seeds, first + np.array(heads, np.uint64)[:, None])
