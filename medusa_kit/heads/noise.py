"""Random numbers by which tokens are drawn, and by which heads predict the draws: each follows from
seed, position and token, so that any of them can be computed without the others, on the
device where it is needed.

Shapes: V vocabulary, C some of its tokens, X any shape.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MASK_64 = (1 << 64) - 1


def noisy(scores_V: Tensor, seed: int, position: int) -> Tensor:
    """scores_V with Gumbel noise on those that can win."""
    if scores_V.device.type != "cpu":  # finding those that can win would wait for the device
        tokens_V = torch.arange(len(scores_V), device=scores_V.device)
        return scores_V + gumbel_noise(seed, position, tokens_V).to(scores_V.dtype)
    # Top-k, top-p and min-p leave few of many thousands of tokens; the others need no noise.
    kept_C = (scores_V > -math.inf).nonzero()[:, 0]
    noise_C = gumbel_noise(seed, position, kept_C).to(scores_V.dtype)
    return scores_V.index_add(0, kept_C, noise_C)


def gumbel_noise(seed: int, position: int, tokens_X: Tensor) -> Tensor:
    """Standard Gumbel noise_X for `tokens_X` as candidates for this position."""
    return gumbel_of(signed(mixed(seed, position)), tokens_X)


def gumbel_of(seeds: Tensor | int, tokens_X: Tensor) -> Tensor:
    """The same. `seeds`: `mixed` seed and position, as signed numbers; a tensor broadcasts."""
    return -(-_uniform(seeds, tokens_X).log()).log().float()


def _uniform(seeds: Tensor | int, tokens_X: Tensor) -> Tensor:
    """A hash of seed and token (SplitMix64)."""
    z_X = tokens_X.long() * signed(0x9E3779B97F4A7C15) + seeds
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z_X = (z_X ^ _shifted(z_X, shift)) * signed(factor)
    z_X = z_X ^ _shifted(z_X, 31)
    return (_shifted(z_X, 11).double() + 0.5) * 2.0**-53  # 53 bits, never 0 or 1


def _shifted(z_X: Tensor, bits: int) -> Tensor:
    """z_X >> bits as if unsigned."""
    return (z_X >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """The same 64 bits, as torch has them."""
    return value - (1 << 64) if value >= 1 << 63 else value


def mixed(seed: int, position: int) -> int:
    """A seed for each pair, with neighbours far apart (the finaliser of SplitMix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def mixed_all(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mixed` of arrays, which broadcast."""
    u = np.uint64
    z = seeds * u(0x9E3779B97F4A7C15) + positions * u(0xD1B54A32D192ED03) + u(0x2545F4914F6CDD1D)
    z = (z ^ (z >> u(30))) * u(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u(27))) * u(0x94D049BB133111EB)
    return z ^ (z >> u(31))
