"""Weights of every kind that the C++ kernels read."""

import torch

from medusa_kit.infer.cpu.packed.packing import Blocks


def random_blocks(codes, group, offsets, halves=True, rows=37, inputs=64):
    generator = torch.Generator().manual_seed(1)
    scales = torch.rand(rows, inputs // group, generator=generator).half().float()
    shifts = torch.randn(rows, inputs // group, generator=generator).half().float()
    scales[0, 0], shifts[1, 0] = 2.0**-24, -(2.0**-15)  # halves without a leading bit
    if not halves:
        scales *= 1 + 2.0**-6
    drawn = torch.randint(*codes, (rows, inputs), generator=generator).to(torch.int8)
    return Blocks(drawn, scales, shifts if offsets else None)


BLOCKS = {
    "int4": random_blocks((0, 16), 32, True),
    "int8": random_blocks((-128, 128), 32, False),
    "int8+": random_blocks((-16, 32), 32, True),
    "int8 by 16": random_blocks((-32, 32), 16, False),
    "int8+ by 16": random_blocks((0, 4), 16, True),
    "int4, wide": random_blocks((0, 16), 32, True, halves=False),
    "int8+, wide": random_blocks((-16, 32), 32, True, halves=False),
}
KINDS = ("float32", "bfloat16", *BLOCKS)


def weights_of(kind):
    if kind in BLOCKS:
        return BLOCKS[kind].expand()
    weights = torch.randn(37, 50, generator=torch.Generator().manual_seed(2))
    return weights.bfloat16().float() if kind == "bfloat16" else weights
