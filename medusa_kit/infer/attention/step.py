"""The step that one forward over trees is: each row's length, and which nodes see which.

The step is attached to the attention modules while the model runs, so that the attention function
finds it whatever keywords a model family drops.

Shapes: B batch, N nodes with root, L cache slots in sight (longest row + N); M repeats of the mask.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from medusa_kit.transfer import to_device

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """Instead of a window: a layer sees the positions of the chunk that a node is in, each of
    `size` positions."""

    size: int


Window = int | Chunk | None  # a number: the newest positions that a layer sees, a node's included


def oldest_seen(window: int | Chunk, positions: Tensor) -> Tensor:
    """The first position that a layer sees from each of these."""
    if isinstance(window, Chunk):
        return positions // window.size * window.size
    return positions - window + 1


@dataclass
class TreeStep:
    """One forward: N nodes after `lengths[b]` committed tokens in each row.

    `depths_BN`: position of a node = length + depth. `sees_BNN`: node i sees node j (its ancestors
    and itself). A prompt is a tree too, the one without branches.

    Rows with different numbers of nodes are padded in attention only: the model gets the nodes of
    all rows as one long row, and `at_N` says where they are among the padded.
    """

    lengths: Sequence[int]
    depths_BN: Tensor
    sees_BNN: Tensor
    causal_prompt: bool = False  # all rows empty, no branches: a causal kernel can compute it
    attend: Callable[..., Tensor] | None = None  # computes an AttentionCall; None: SDPA
    split_finely: bool = False  # spread short rows over several programs too, as long rows are
    lengths_B: Tensor | None = None  # the lengths on the nodes' device, if they are there already
    at_N: Tensor | None = None  # see `Forest.in_padded`: the model runs these nodes as one row
    _shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return self.depths_BN.shape[1]

    @property
    def num_positions(self) -> int:
        return max(self.lengths) + self.num_nodes

    @property
    def seq_length(self) -> int:
        """The tokens in the cache, as the cache counts them for a model: the longest row's."""
        return max(self.lengths)

    def positions(self) -> Tensor:
        """positions_BN of the nodes."""
        return self.device_lengths()[:, None] + self.depths_BN

    def sees_all(self, window: Window) -> bool:
        """Whether no slot in sight is hidden: one node a row, rows of one length, no window."""
        even = min(self.lengths) == max(self.lengths)
        return self.num_nodes == 1 and even and not self.window_applies(window)

    def is_causal(self, window: Window) -> bool:
        return self.causal_prompt and not self.window_applies(window)

    def mask(self, window: Window, repeats: int = 1) -> Tensor:
        """Which slots each node attends to, bool [B, 1, M·N, L], the N nodes repeated M times.

        In a window, or a chunk, positions count, not slots, since sibling nodes share a position.
        """
        effective = window if self.window_applies(window) else None
        return self.once(
            (effective, repeats),
            lambda: self._build_mask(effective).repeat(1, repeats, 1).unsqueeze(1),
        )

    def additive_mask(self, window: Window, repeats: int, dtype: torch.dtype) -> Tensor:
        """The mask as numbers to add to scores, 0 and -inf, built once for all layers."""
        effective = window if self.window_applies(window) else None
        mask = self.mask(window, repeats)

        def build() -> Tensor:
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            return zeros.masked_fill_(~mask, float("-inf"))

        return self.once((effective, repeats, dtype), build)

    def once(self, key: Any, build: Callable[[], T]) -> T:
        """What all layers of this forward share, built by the first layer that needs `key`."""
        if key not in self._shared:
            self._shared[key] = build()
        return self._shared[key]

    def window_applies(self, window: Window) -> bool:
        size = window.size if isinstance(window, Chunk) else window
        return size is not None and self.num_positions > size

    def padded(self, flat_1HNE: Tensor) -> Tensor:
        """[B, H, N, E] from the nodes of all rows as one; zeros where padded."""
        (B, N), (_, H, _, E) = self.depths_BN.shape, flat_1HNE.shape
        padded_XHE = flat_1HNE.new_zeros(B * N, H, E)
        padded_XHE[self.at_N] = flat_1HNE[0].transpose(0, 1)
        return padded_XHE.view(B, N, H, E).transpose(1, 2)

    def unpadded(self, padded_BNX: Tensor) -> Tensor:
        """The nodes of all rows as one row."""
        return padded_BNX if self.at_N is None else padded_BNX.flatten(0, 1)[self.at_N][None]

    def device_lengths(self) -> Tensor:
        """lengths_B on the nodes' device."""
        if self.lengths_B is None:
            self.lengths_B = to_device(self.lengths, self.depths_BN.device)
        return self.lengths_B

    def _build_mask(self, window: Window) -> Tensor:
        device = self.depths_BN.device
        lengths_B11 = self.device_lengths()[:, None, None]
        slots_L = torch.arange(self.num_positions, device=device)
        mask_BNL = (slots_L < lengths_B11).expand(-1, self.num_nodes, -1).clone()
        sees_BNN = self.sees_BNN
        if window is not None:
            positions_BN = self.positions()
            oldest_BN1 = oldest_seen(window, positions_BN)[:, :, None]
            mask_BNL &= slots_L >= oldest_BN1
            sees_BNN = sees_BNN & (positions_BN[:, None, :] >= oldest_BN1)
        for row, length in enumerate(self.lengths):
            mask_BNL[row, :, length : length + self.num_nodes] = sees_BNN[row]
        return mask_BNL


class StepHolder:
    """The step that the current thread is running on a model, or None. Each model has one holder.

    Other threads may run the model meanwhile, for example in transformers' own generate.
    """

    def __init__(self, mask_form: str | None = None, switched_from: str | None = None) -> None:
        self._local = threading.local()
        self.mask_form = mask_form  # sdpa or eager: the class keeps its own attention
        self.switched_from = switched_from  # the attention that the model came with
        self.pads = False  # rows with fewer nodes are padded in the whole model

    @property
    def step(self) -> TreeStep | None:
        return getattr(self._local, "step", None)

    @step.setter
    def step(self, step: TreeStep | None) -> None:
        self._local.step = step

    def __reduce__(self) -> tuple[Any, ...]:  # for copies of the model
        return StepHolder, (self.mask_form, self.switched_from)

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """The `attention_mask` that the model is given during the step, always 4-D.

        transformers passes a 4-D mask on unread. Tree attention builds each layer's own mask from
        the step; stock attention takes this one, as booleans or as numbers to add.
        """
        assert self.step is not None
        if self.mask_form is None:
            return self.step.depths_BN.new_ones(1, 1, 1, 1, dtype=torch.bool)
        if self.mask_form == "sdpa":
            return self.step.mask(None)
        return self.step.additive_mask(None, 1, dtype)


HOLDER_ATTRIBUTE = "medusa_step_holder"


def attach_holder(model: Any) -> StepHolder:
    """Give every module of `model` the model's one holder, made now if there is none."""
    holder = getattr(model, HOLDER_ATTRIBUTE, None) or StepHolder()
    for module in model.modules():
        setattr(module, HOLDER_ATTRIBUTE, holder)
    return holder


def current_step(module: Any) -> TreeStep | None:
    holder: StepHolder | None = getattr(module, HOLDER_ATTRIBUTE, None)
    return holder.step if holder else None
