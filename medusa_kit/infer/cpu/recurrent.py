"""The network that `recurrent` heads share (heads/blocks.py) as the kernels run it (recurrent.h).

Drafts need not be exact, so its weights are rounded to eight bits where their rows can be cut into
groups; norms and gains keep their numbers.

Shapes: D hidden, K heads.
"""

from medusa_kit.heads.blocks import NORM_EPSILON, UNIT_EPSILON
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.heads import GAIN, INPUT, PackedHeads
from medusa_kit.infer.cpu.packed.int8_weights import rounding


class PackedRecurrent:
    """A copy of a frozen network's weights."""

    def __init__(self, packed: PackedHeads, num_blocks: int) -> None:
        matrices, vectors = packed.matrices, packed.vectors
        self._input, self._gain_KD = matrices[INPUT], vectors[GAIN]
        self._pairs = [
            (matrices[f"recurrent.{i}.gate_up"], matrices[f"recurrent.{i}.down"])
            for i in range(num_blocks)
        ]
        self._norms = [vectors[f"recurrent.{i}.norm"] for i in range(num_blocks)]
        all_matrices = [self._input, *(matrix for pair in self._pairs for matrix in pair)]
        numbers = sum(matrix.numel() for matrix in [*self._norms, self._gain_KD])
        self.num_bytes = sum(matrix.num_bytes for matrix in all_matrices) + 4 * numbers
        structs = [matrix.struct for matrix in all_matrices]
        self.work = sum(struct.outputs * struct.inputs for struct in structs)  # of a step
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
