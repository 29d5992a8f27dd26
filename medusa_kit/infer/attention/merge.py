"""Attention over parts of the keys, merged by their log-sum-exp.

Softmax over two sets of keys is a weighted mean of the softmaxes over each. With o and l the output
and log-sum-exp of a part, the whole is Σ exp(l − L) o, where L is the log-sum-exp of all l. This is
exact; only rounding differs from one softmax over everything.

Shapes: B batch, H query heads, N nodes, E head dim of the values, S parts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]  # (output [B, H, N, E], natural log-sum-exp [B, H, N])


def merge(parts: Sequence[Part], sinks_H: Tensor | None = None) -> Tensor:
    """Attention [B, H, N, E] over all parts, in the log-sum-exps' precision.

    A part without keys has log-sum-exp -inf, and its output is ignored. Where all parts are empty
    the result is 0. `sinks_H`: see AttentionCall.
    """
    lses = [lse_BHN for _, lse_BHN in parts]
    if sinks_H is not None:
        lses.append(sinks_H.to(lses[0]).view(1, -1, 1).expand_as(lses[0]))
    weights_SBHN = torch.stack(lses).softmax(0).nan_to_num(0.0)
    outs = [
        (out * weight[..., None]).masked_fill(weight[..., None] == 0, 0.0)
        for (out, _), weight in zip(parts, weights_SBHN, strict=False)
    ]
    return torch.stack(outs).sum(0)
