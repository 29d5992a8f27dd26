"""Numbers of a run that become NaN or infinite: they end it before anything of them is kept.

All processes see the same sums, or ask each other, so they stop together.

Shapes: K heads.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from medusa_kit.base.faults.finite import not_finite
from medusa_kit.train.loss.loss import HeadsLoss
from medusa_kit.train.processes import distributed

OF_A_HEAD = re.compile(r"(?:^|\.)(?:blocks|projections)\.(\d+)\.")
MOST_NAMED = 3  # tensors in a message
BASE = "the base"


def damaged(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> list[str]:
    """The names of those that hold NaN or infinite numbers in any process, which all call this."""
    own = [name for name, tensor in tensors if not_finite(tensor)]
    if not distributed.any_of(bool(own), device):
        return []
    return list(dict.fromkeys(name for names in distributed.gathered(own) for name in names))


def frozen(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights that are not trained, of ZeRO-3 this process's parts."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            yield name, getattr(parameter, "ds_tensor", parameter).detach()


def in_words(names: Sequence[str]) -> str:
    """Tensors for a message, with the head that each is part of."""
    parts = []
    for name in names[:MOST_NAMED]:
        head = OF_A_HEAD.search(name)
        parts.append(name if head is None else f"heads[{head[1]}] ({name})")
    more = len(names) - len(parts)
    return ", ".join(parts) + (f" and {more} more" if more else "")


def whose(total: HeadsLoss, joint: bool) -> str:
    """The heads whose losses are no numbers, and the base where it is trained too (`joint`)."""
    found = heads_among(total.per_head_K.tolist())
    if joint and not math.isfinite(float(total.base)):
        found = [BASE, *found]
    return ", ".join(found) or "the sum over heads"


def heads_among(losses: Sequence[float]) -> list[str]:
    """The heads whose losses are no numbers."""
    return [f"heads[{k}]" for k, loss in enumerate(losses) if not math.isfinite(loss)]
