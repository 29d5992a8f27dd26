"""Guesses of tokens that will be drawn, not named by argmax.

A token is drawn as the argmax of the base's scores plus noise that follows from seed, place and
token alone (infer/accept/noise.py). So the noise ahead is known, and a head's best guess is what it
picks from the head's own distribution. Which guesses are made does not change what is drawn.

Top-k, top-p and min-p are left to the base: heads' distributions are wider than its own, and the
tokens that would be cut from them are not those that are cut from it (measured).

Shapes: R columns of the projection, X any leading shape.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

# A head's distribution is a mean over what the base may say, and wider than what it does say. The
# noise picks the base's token most often from it at this share of the temperature (measured).
SHARPER = 0.7
# Chances of guesses are their shares of exp(this * sum of score and noise) among so many of the
# highest at least: fitted to how often the base's draw was the guess. infer/cpu/heads.h has the
# same.
OF_A_SUM, AMONG = 0.6, 8


class DrawnPlace(NamedTuple):
    """What heads need to know of a place in the text. `seed`: of its noise, 64 bits."""

    temperature: float
    seed: int


class Draws(Protocol):
    """How the tokens after one row's root will be drawn."""

    def place(self, k: int) -> DrawnPlace:
        """That of the token which head k guesses."""

    def noised(self, logits_XR: Tensor, ids_R: Tensor, k: int) -> Tensor:
        """scores_XR of head k with the noise there; ids_R: the tokens of the columns."""


RowsDraws = Sequence[Draws | None]  # of each row; None: its tokens are not drawn
