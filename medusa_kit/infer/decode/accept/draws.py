"""The settings of transformers' warpers as numbers. With them the C++ kernels draw
(infer/cpu/draw.h) what the warpers and the noise give, in a twentieth of the time.

Shapes: V vocabulary.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_kit.heads.noise import mixed
from medusa_kit.infer.cpu.binding import kernels

# In this order, each at most once: the end of any list of processors for sampling.
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass(frozen=True)
class Warping:
    """What the warpers at the end of a list of processors do."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    def draw(self, scores_V: Tensor, seed: int, position: int) -> int:
        """The token that the noise of this position picks from scores_V, in float32 on a CPU."""
        library = kernels.loaded_library()
        assert library is not None, "kernels_draw"
        scores_V = scores_V.contiguous()
        draw = kernels.Draw(
            scores_V.data_ptr(), len(scores_V), 0, self.temperature,
            min(self.top_k, len(scores_V)), self.top_p, self.min_p, mixed(seed, position),
        )  # fmt: skip
        return int(library.mk_draw(ctypes.byref(draw)))


def kernels_draw(device: torch.device) -> bool:
    """Whether `Warping.draw` works for logits there."""
    return device.type == "cpu" and kernels.loaded_library() is not None


def split_warpers(processors: Sequence[Any]) -> tuple[Sequence[Any], Warping | None]:
    """(the processors before the warpers, what these do); None: it is not in these numbers."""
    first = len(processors)
    while first and type(processors[first - 1]) in WARPERS:
        first -= 1
    last = processors[first:]
    order = [WARPERS.index(type(warper)) for warper in last]
    if order != sorted(set(order)) or not all(_is_plain(warper) for warper in last):
        return processors, None
    names = [field.name for field in fields(Warping)]
    values = {
        name: getattr(warper, name) for warper in last for name in names if hasattr(warper, name)
    }
    return processors[:first], Warping(**values)


def _is_plain(warper: Any) -> bool:
    """Whether it removes tokens as transformers does by default."""
    if isinstance(warper, TemperatureLogitsWarper):
        return True
    min_kept = getattr(warper, "min_tokens_to_keep", 1)
    return min_kept == 1 and warper.filter_value == -math.inf
