"""The interface of a tree attention backend: its argument, and the cases that it supports.

Shapes: B batch, H query heads, G key/value heads, N nodes with root, L slots in sight, E head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_kit.infer.attention.step import Chunk, TreeStep, Window


@dataclass(slots=True)  # not frozen: one is made in every layer of every step
class AttentionCall:
    """The input of tree attention in one layer of one forward.

    `window`: how many of the newest positions a node sees, its own included, or chunks, of which it
    sees its own (Llama 4). `softcap` (Gemma 2) bounds the scores. `sinks_H` (gpt-oss) take part in
    the softmax and add nothing to the output.
    """

    query_BHNE: Tensor
    key_BGLE: Tensor
    value_BGLE: Tensor
    step: TreeStep
    scale: float
    window: Window = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def standard(self) -> bool:
        """Whether it is a plain softmax, as torch's own attention computes it."""
        return self.softcap is None and self.sinks_H is None

    @property
    def slides(self) -> int | None:
        """The window of a call without chunks."""
        assert not isinstance(self.window, Chunk)
        return self.window

    @property
    def sees_all(self) -> bool:
        """Whether a plain softmax without a mask computes it: no slot is hidden from any node."""
        return self.standard and self.step.sees_all(self.window)

    @property
    def is_causal(self) -> bool:
        """Whether it is the start of a prompt, which stock causal attention can compute."""
        return self.standard and self.step.is_causal(self.window)


CHUNKS = "attention in chunks"  # why a backend is left out


@dataclass(frozen=True)
class Case:
    """The properties of a call that decide whether a backend supports it. Trees, lengths and
    windows that slide are not among them, since every backend supports all of these.

    `hides`: whether some slot is hidden from some node (not `AttentionCall.sees_all`).
    `index`: the device's index; None is the current device.
    """

    device: str  # cpu | cuda | ...
    dtype: torch.dtype
    head_size: int
    value_size: int
    softcap: bool = False
    sinks: bool = False
    hides: bool = True
    chunks: bool = False
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
            isinstance(call.window, Chunk),
            query_BHNE.device.index,
        )


@dataclass(frozen=True)
class Backend:
    """`attend`: the attention output [B, N, H, E] of a call.

    `unsupported`: why it cannot compute a case, or None. `missing`: what this installation lacks
    for it and the extra that provides that, or None. `reads_lengths`: whether it reads the rows'
    lengths on the host, so that a step of fixed shapes cannot use it.
    """

    attend: Callable[[AttentionCall], Tensor]
    unsupported: Callable[[Case], str | None]
    missing: Callable[[], tuple[str, str] | None] = lambda: None
    reads_lengths: bool = False


class BackendFailure(RuntimeError):
    """A backend that supports a case cannot run on this machine; `str` says why."""


def compute_capability(index: int | None = None) -> tuple[int, int]:
    """The compute capability of the CUDA device with that index, or of the current one."""
    return torch.cuda.get_device_capability(index)
