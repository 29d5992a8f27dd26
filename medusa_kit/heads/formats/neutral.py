"""What every Medusa checkpoint holds, in the form that readers produce and writers take.

Head i is L residual blocks x + SiLU(Wx + b), then a matrix to the vocabulary without a bias.

Shapes: D hidden, V vocabulary (rows of the base's output embedding), R rows of a vocabulary matrix
(V, or one for each id of the token map).
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    weight_DD: Tensor
    bias_D: Tensor


@dataclass(frozen=True)
class ForeignHeads:
    """K heads of L blocks each, in the dtypes they were stored in.

    matrices     one [R, D] for each head; or one that all heads share; or None: the base's own
    token_map_R  the token id of each row of the matrices, where they score only some tokens
    vocab_size   V where the checkpoint states it
    base_name    the base model that the checkpoint names
    adapter      tensors of a LoRA adapter that was trained with the heads, by name
    encoding     how text was encoded that they learned, where the checkpoint states it
    base_config  what the base's config said of how it computes, where the checkpoint states it
    notes        remarks on the reading, for the user
    """

    format: str
    blocks: list[list[Block]]
    matrices: list[Tensor] | Tensor | None
    token_map_R: Tensor | None = None
    vocab_size: int | None = None
    base_name: str | None = None
    adapter: dict[str, Tensor] = field(default_factory=dict)
    encoding: str | None = None
    base_config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks[0])

    @property
    def hidden_size(self) -> int:
        return int(self.blocks[0][0].weight_DD.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0][0].weight_DD.dtype

    @property
    def has_bias(self) -> bool:
        """Whether any bias is different from zero."""
        return any(bool(block.bias_D.any()) for blocks in self.blocks for block in blocks)

    def matrix_list(self) -> list[Tensor]:
        """The matrices there are: none where the base's own are used, one where one is shared."""
        if self.matrices is None:
            return []
        return self.matrices if isinstance(self.matrices, list) else [self.matrices]

    def describe(self) -> str:
        """The heads in words: 5 heads of 1 block, a vocabulary matrix each."""
        if self.matrices is None:
            matrix = "the base's vocabulary matrix"
        elif isinstance(self.matrices, list):
            matrix = "a vocabulary matrix each"
        else:
            matrix = "one vocabulary matrix for all"
        if self.token_map_R is not None:
            matrix += f" over {len(self.token_map_R)} tokens"
        return (
            f"{_count(self.num_heads, 'head')} of {_count(self.num_blocks, 'block')}, {matrix}, "
            f"{str(self.dtype).removeprefix('torch.')}"
        )


def without_empty_heads(heads: ForeignHeads) -> ForeignHeads:
    """Heads without any block (a bare matrix) get one of zeros: x + SiLU(0) is x exactly."""
    if heads.blocks[0]:
        return heads
    first = heads.matrix_list()[0]
    zeros = Block(first.new_zeros(first.shape[1], first.shape[1]), first.new_zeros(first.shape[1]))
    note = "the heads have no residual block: one of zeros was added, which changes nothing"
    return replace(heads, blocks=[[zeros]] * heads.num_heads, notes=(*heads.notes, note))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
