"""Q4_K and Q6_K of GGUF files are packed with their scales in bytes: the same bits, less memory."""

import ctypes
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from medusa_kit.infer.cpu import kernels
from medusa_kit.infer.packed.gguf_blocks import blocks_in_order, read_factors, read_scales
from medusa_kit.infer.packed.model import chosen_rows, expanded_rows
from medusa_kit.infer.packed.packing import (
    KINDS,
    Blocks,
    PackedMatrix,
    interleaved_blocks,
    joined_blocks,
    pack,
)

OUTPUTS, INPUTS = 70, 512  # panels that are not full
# of 256 weights: where 16-bit factors lie
FACTORS = {"Q4_K": (0, 2), "Q6_K": (208,)}

library = kernels.load_library()
needs_kernels = pytest.mark.skipif(library is None, reason="the C++ kernels are not available")


class Stored(NamedTuple):
    """As the gguf package's reader gives a tensor."""

    data: Any
    tensor_type: Any


def random_blocks(name: str, seed: int = 0, outputs: int = OUTPUTS) -> Blocks:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[name]
    size, num_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (outputs * INPUTS // size, num_bytes), dtype=np.uint8)
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


def product(matrix: PackedMatrix, x_RI: torch.Tensor, threads: int = 2) -> torch.Tensor:
    assert library is not None
    out_RO = torch.empty(len(x_RI), matrix.struct.outputs)
    pointers = x_RI.data_ptr(), len(x_RI), out_RO.data_ptr()
    library.mk_linear(ctypes.byref(matrix.struct), *pointers, threads)
    return out_RO


def packed(blocks: Blocks) -> PackedMatrix:
    return pack(blocks.expand(), None, blocks)


@pytest.mark.parametrize(("name", "form", "bits"), [
    ("Q4_K", "int4 by 256", 4.625), ("Q6_K", "int6 by 256", 6.5625),
])  # fmt: skip
def test_a_weight_takes_about_the_bits_of_the_file(name: str, form: str, bits: float) -> None:
    matrix = packed(random_blocks(name))
    assert matrix.kind == form
    panels = 96  # outputs, with the empty ones
    assert matrix.num_bytes * 8 == bits * panels * INPUTS


@needs_kernels
@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 20])
def test_products_are_close_to_exact_and_the_same_in_any_batch(name: str, rows: int) -> None:
    blocks = random_blocks(name)
    matrix, x_RI = packed(blocks), torch.randn(rows, INPUTS)
    found_RO = product(matrix, x_RI)
    exact_RO = x_RI.double() @ blocks.expand().double().T
    assert float((found_RO - exact_RO).abs().max() / exact_RO.std()) < 2e-5
    alone_RO = torch.cat([product(matrix, row[None], threads=1) for row in x_RI])
    assert torch.equal(found_RO, alone_RO)


@needs_kernels
@pytest.mark.parametrize("name", FACTORS)
def test_rows_are_expanded_to_the_very_weights(name: str) -> None:
    blocks = random_blocks(name)
    ids_R = torch.tensor([3, 69, 0, 33, 16])
    assert torch.equal(expanded_rows(packed(blocks), ids_R), blocks.expand()[ids_R])


@needs_kernels
@pytest.mark.parametrize("name", FACTORS)
def test_rows_can_be_chosen_from_what_is_packed(name: str) -> None:
    matrix, x_RI = packed(random_blocks(name)), torch.randn(2, INPUTS)
    ids_R = torch.tensor([3, 69, 0, 33, 16])
    chosen = chosen_rows(matrix, ids_R)
    assert chosen.kind == matrix.kind
    assert torch.equal(product(chosen, x_RI), product(matrix, x_RI)[:, ids_R])


@pytest.mark.parametrize("name", FACTORS)
def test_blocks_that_are_joined_keep_their_factors(name: str) -> None:
    parts = [random_blocks(name, seed, 32) for seed in (1, 2)]
    expected = [part.expand() for part in parts]
    joined = joined_blocks(parts)
    assert torch.equal(joined.expand(), torch.cat(expected))
    assert KINDS[joined.kind] == KINDS[parts[0].kind]
    mixed = joined_blocks([parts[0], replace(parts[1], factors=())])
    assert torch.equal(mixed.expand(), torch.cat(expected))
    assert "256" not in KINDS[mixed.kind]
    assert "256" in KINDS[interleaved_blocks(*parts).kind]
