"""How a row draws its tokens, as far as it is in numbers: settings of transformers' warpers, and
seeds of the noise.

With them the C++ kernels draw (infer/cpu/draw.h) what transformers' processors and the noise give,
in a twentieth of the time, and heads guess what will be drawn (heads/draws.py).

Shapes: V vocabulary, R columns of a projection, X any leading shape.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_kit.heads.draws import SHARPER, DrawnPlace
from medusa_kit.infer.accept.noise import gumbel_noise, mixed
from medusa_kit.infer.cpu import kernels

# In this order, each at most once: the end of any list of processors for sampling.
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass(frozen=True)
class Warping:
    """What the warpers at the end of a list of processors do."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    def draw(self, scores_V: Tensor, seed: int, position: int) -> int | None:
        """The token that the noise of this place picks from scores_V; None where the kernels cannot
        say."""
        library = kernels.loaded_library()
        if library is None or scores_V.device.type != "cpu" or scores_V.dtype != torch.float32:
            return None
        scores_V = scores_V.contiguous()
        draw = kernels.Draw(
            scores_V.data_ptr(), len(scores_V), 0, self.temperature, self.top_k, self.top_p,
            self.min_p, mixed(seed, position),
        )  # fmt: skip
        return int(library.mk_draw(ctypes.byref(draw)))


def split_warpers(processors: Sequence[Any]) -> tuple[Sequence[Any], Warping | None]:
    """(the processors before the warpers, what these do); None: it is not in these numbers."""
    first = len(processors)
    while first and type(processors[first - 1]) in WARPERS:
        first -= 1
    last = processors[first:]
    order = [WARPERS.index(type(one)) for one in last]
    if order != sorted(set(order)) or not all(_is_plain(one) for one in last):
        return processors, None
    names = ("temperature", "top_k", "top_p", "min_p")
    values = {name: getattr(one, name) for one in last for name in names if hasattr(one, name)}
    return processors[:first], Warping(**values)


def _is_plain(warper: Any) -> bool:
    """Whether it removes tokens as transformers does by default."""
    if isinstance(warper, TemperatureLogitsWarper):
        return True
    fewest = getattr(warper, "min_tokens_to_keep", 1)
    return fewest == 1 and warper.filter_value == -math.inf


@dataclass(frozen=True)
class RowDraws:
    """How the tokens after a row's root are drawn. `first`: the place of the first of them."""

    temperature: float
    seed: int
    first: int

    def place(self, k: int) -> DrawnPlace:
        return DrawnPlace(SHARPER * self.temperature, mixed(self.seed, self.first + k))

    def noised(self, logits_XR: Tensor, ids_R: Tensor, k: int) -> Tensor:
        scores_XR = logits_XR.float() / (SHARPER * self.temperature)
        return scores_XR + gumbel_noise(self.seed, self.first + k, ids_R)
