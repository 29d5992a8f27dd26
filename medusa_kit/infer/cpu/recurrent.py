"""The network that `recurrent` heads share (heads/blocks.py) as the kernels run it (recurrent.h).

Drafts need not be exact, so its weights are rounded to eight bits where their rows can be cut into
groups; norms and gains keep their numbers.

Shapes: D hidden, K heads.
"""

import torch

from medusa_kit.heads.blocks import NORM_EPSILON, UNIT_EPSILON, GatedBlock, RecurrentNetwork
from medusa_kit.infer.cpu import kernels
from medusa_kit.infer.cpu.int8_weights import packed_rounded, rounding
from medusa_kit.infer.packed.packing import interleaved


class PackedRecurrent:
    """A copy of a frozen network's weights."""

    @torch.no_grad()
    def __init__(self, network: RecurrentNetwork) -> None:
        layers = [block for block in network.blocks if isinstance(block, GatedBlock)]
        self._input = packed_rounded(network.input.weight)
        self._pairs = [
            (
                packed_rounded(interleaved(block.w1.weight, block.w3.weight)),
                packed_rounded(block.w2.weight),
            )
            for block in layers
        ]
        self._norms = [block.norm.weight.detach().float().clone() for block in layers]
        self._gain_KD = network.gain.detach().float().contiguous().clone()
        matrices = [self._input, *(one for pair in self._pairs for one in pair)]
        numbers = sum(one.numel() for one in [*self._norms, self._gain_KD])
        self.num_bytes = sum(one.num_bytes for one in matrices) + 4 * numbers
        self.work = sum(one.struct.outputs * one.struct.inputs for one in matrices)  # of a step
        blocks = (kernels.RecurrentBlock * len(self._pairs))(
            *(
                kernels.RecurrentBlock(rounding(gate_up), rounding(down), norm.data_ptr())
                for (gate_up, down), norm in zip(self._pairs, self._norms, strict=True)
            )
        )
        self.struct = kernels.Recurrent(
            self._pairs[0][1].struct.inputs, len(self._pairs), NORM_EPSILON, UNIT_EPSILON,
            rounding(self._input), blocks, self._gain_KD.data_ptr(),
        )  # fmt: skip
