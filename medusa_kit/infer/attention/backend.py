"""The interface of a tree attention backend: what it is called with, which cases it supports.

Shapes: B batch, H query heads, G key/value heads, N nodes with root, L slots in sight, E head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_kit.infer.tree_step import TreeStep


@dataclass(slots=True)  # not frozen: one is made in every layer of every step
class AttentionCall:
    """What one layer asks of tree attention in one forward.

    `window`: how many positions back a node sees, itself included. `softcap` (Gemma 2) limits the
    scores; `sinks_H` (gpt-oss) take weight and give nothing.
    """

    query_BHNE: Tensor
    key_BGLE: Tensor
    value_BGLE: Tensor
    step: TreeStep
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def standard(self) -> bool:
        """Whether it is softmax alone, as torch's own attention computes it."""
        return self.softcap is None and self.sinks_H is None

    @property
    def sees_all(self) -> bool:
        """Whether no node is hidden from any slot in sight, so that no mask is needed."""
        return self.standard and self.step.sees_all(self.window)

    @property
    def is_causal(self) -> bool:
        """Whether it is a prompt from its start on, for which stock causal attention will do."""
        return self.standard and self.step.is_causal(self.window)


@dataclass(frozen=True)
class Case:
    """What decides whether a backend can do a call. Trees, lengths and windows do not: every
    backend does all of them.

    `hides`: whether stock kernels alone cannot do it (`AttentionCall.sees_all`).
    `index`: which device of its kind; None is the current one.
    """

    device: str  # cpu | cuda | ...
    dtype: torch.dtype
    head_size: int
    value_size: int
    softcap: bool = False
    sinks: bool = False
    hides: bool = True
    index: int | None = None

    @classmethod
    def of(cls, call: AttentionCall) -> "Case":
        query_BHNE = call.query_BHNE
        return cls(
            query_BHNE.device.type,
            query_BHNE.dtype,
            query_BHNE.shape[-1],
            call.value_BGLE.shape[-1],
            call.softcap is not None,
            call.sinks_H is not None,
            not call.sees_all,
            query_BHNE.device.index,
        )


@dataclass(frozen=True)
class Backend:
    """`attend`: the attention output [B, N, H, E] of a call.

    `unsupported` says why a case cannot be done, or None; `missing` the same of this installation,
    with the extra that would bring what is missing. `reads_lengths`: whether it reads the rows'
    lengths on the host, so that a step of fixed shapes cannot use it.
    """

    attend: Callable[[AttentionCall], Tensor]
    unsupported: Callable[[Case], str | None]
    missing: Callable[[], tuple[str, str] | None] = lambda: None
    reads_lengths: bool = False


class BackendFailure(RuntimeError):
    """A backend that could have done a case cannot run on this machine; `str` says why."""


def compute_capability(index: int | None = None) -> tuple[int, int]:
    """Of the CUDA device with that index, or of the current one."""
    return torch.cuda.get_device_capability(index)
