"""A packed matrix of every kind that the C++ kernels multiply as integers, with inputs for it.

Shapes: R rows, O outputs, I inputs.
"""

from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch

from medusa_kit.infer.cpu.packed.gguf_blocks import blocks_in_order, read_factors, read_scales
from medusa_kit.infer.cpu.packed.packing import Blocks, PackedMatrix, pack
from support.kernels.packed_weights import BLOCKS

DIGITS = {"float32": 3, "int16": 2, "int8": 1}  # of 8 bits, by the name of the activations
# Of Q4_K and Q6_K: where the 16-bit factors of 256 weights lie.
FACTORS = {"Q4_K": (0, 2), "Q6_K": (208,)}
ROWS = 21


class Form(NamedTuple):
    name: str
    matrix: PackedMatrix
    weight_OI: torch.Tensor
    size_OI: torch.Tensor  # of a weight's product and of its offset, which may have cancelled out
    x_RI: torch.Tensor

    def with_digits(self, digits: int) -> PackedMatrix:
        return with_digits(self.matrix, digits)


class Stored(NamedTuple):
    """As the gguf package's reader gives a tensor."""

    data: Any
    tensor_type: Any


def with_digits(matrix: PackedMatrix, digits: int) -> PackedMatrix:
    struct = type(matrix.struct).from_buffer_copy(matrix.struct)
    struct.digits = digits
    same = copy(matrix)
    object.__setattr__(same, "struct", struct)
    return same


def shared_factors(name: str, seed: int = 0, outputs: int = 70, inputs: int = 512) -> Blocks:
    """Random blocks of Q4_K or Q6_K."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[name]
    size, num_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (outputs * inputs // size, num_bytes), dtype=np.uint8)
    for place in FACTORS[name]:
        halves = np.float16(generator.uniform(1e-4, 1e-3, len(raw)))
        raw[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    raw = raw.reshape(outputs, -1)
    weight_OI = torch.tensor(dequantize(raw, kind))
    tensor = Stored(raw, kind)
    scales = read_scales(tensor, outputs)
    assert scales is not None
    blocks = blocks_in_order(weight_OI, *scales, factors=read_factors(tensor, outputs))
    assert blocks is not None
    assert torch.equal(blocks.expand(), weight_OI)
    return blocks


def inputs_for(weight_OI: torch.Tensor) -> torch.Tensor:
    """Rows with one number of a group far above the others, which the products must not lose."""
    generator = torch.Generator().manual_seed(4)
    x_RI = torch.randn(ROWS, weight_OI.shape[1], generator=generator)
    x_RI[:, 5] *= 1000
    return x_RI


def forms() -> Iterator[Form]:
    named = {**BLOCKS, **{name: shared_factors(name) for name in FACTORS}}
    for name, blocks in named.items():
        yield form_of(name, blocks)


def form_of(name: str, blocks: Blocks) -> Form:
    weight_OI = blocks.expand()
    size_OI = blocks.codes_OI.abs().float() * blocks.scales_OQ.abs().repeat_interleave(
        blocks.group, 1
    )
    if blocks.offsets_OQ is not None:
        size_OI += blocks.offsets_OQ.abs().repeat_interleave(blocks.group, 1)
    matrix = pack(weight_OI, None, blocks)
    return Form(name, matrix, weight_OI, size_OI, inputs_for(weight_OI))
