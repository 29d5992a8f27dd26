"""Sizes of tiles, splits and tails of the fused kernels.

None depends on the number of nodes or rows, since a sum by another tile may be rounded otherwise.
"""

from typing import Any

from medusa_kit.infer.attention.triton_backend import MAX_REGISTERS
from medusa_kit.infer.device.captured import power_of_two

TAIL, DEEPEST = 64, 47  # as in fused/attention.py, which needs triton
SAME_SPLITS, FIRST_SPLIT = 16, 128
MAX_SPLITS = 128
PRODUCT_NODES = 64  # of a tile of the exact product
ACTIVATED = 1024  # numbers of the MLP that a program takes
HEADS_AT_ONCE = 8


def common_power(*counts: int) -> int:
    """The largest power of two that divides all of these."""
    heads = HEADS_AT_ONCE
    while any(count % heads for count in counts):
        heads //= 2
    return heads


def num_splits(in_sight: int) -> int:
    """The splits of the longest prefix that a row of so many slots can have."""
    prefix, splits, start = max(in_sight - 1 - DEEPEST, 0), 0, 0
    while start < prefix:
        start += FIRST_SPLIT << splits // SAME_SPLITS
        splits += 1
    return splits


def product_tile(outputs: int, item_size: int) -> dict[str, int]:
    """By the size of the weights alone: what depends on the number of nodes would sum otherwise."""
    if item_size > 2:  # no tensor cores: sums stay in registers
        return {"BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    tile = {"BLOCK_K": 128, "num_warps": 4, "maxnreg": MAX_REGISTERS}
    if outputs < 16384:  # small tiles, so that there are enough for all cores
        return {"BLOCK_N": 32, "num_stages": 4, **tile}
    return {"BLOCK_N": 64, "num_stages": 3, **tile}


def attention_tile(head_size: int, item_size: int) -> tuple[int, dict[str, Any]]:
    """(query rows of a tile of the prefix, the rest), by the model alone, as for products."""
    block_e = max(16, power_of_two(head_size))
    tile = {"BLOCK_L": 32, "BLOCK_E": block_e, "num_warps": 4, "num_stages": 2}
    if item_size > 2:
        return 16, tile | {"BLOCK_L": 16}
    tile["maxnreg"] = MAX_REGISTERS
    return 32, tile | {"BLOCK_L": 16 if block_e > 128 else 32}
