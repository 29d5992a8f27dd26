"""Q4_K and Q6_K of GGUF files are packed with their scales in bytes: the same bits, less memory."""

import ctypes
from dataclasses import replace

import pytest
import torch
from support.kernels.forms import FACTORS, shared_factors

from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.model import chosen_rows, expanded_rows
from medusa_kit.infer.cpu.packed.packing import (
    KINDS,
    Blocks,
    PackedMatrix,
    interleaved_blocks,
    joined_blocks,
    pack,
)

OUTPUTS, INPUTS = 70, 512  # panels that are not full

library = kernels.load_library()
needs_kernels = pytest.mark.skipif(library is None, reason="the C++ kernels are not available")


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
    matrix = packed(shared_factors(name))
    assert matrix.kind == form
    panels = 96  # outputs, with the empty ones
    assert matrix.num_bytes * 8 == bits * panels * INPUTS


@needs_kernels
@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 20])
def test_products_are_close_to_exact_and_the_same_in_any_batch(name: str, rows: int) -> None:
    blocks = shared_factors(name)
    matrix, x_RI = packed(blocks), torch.randn(rows, INPUTS)
    found_RO = product(matrix, x_RI)
    exact_RO = x_RI.double() @ blocks.expand().double().T
    assert float((found_RO - exact_RO).abs().max() / exact_RO.std()) < 2e-5
    alone_RO = torch.cat([product(matrix, row[None], threads=1) for row in x_RI])
    assert torch.equal(found_RO, alone_RO)


@needs_kernels
@pytest.mark.parametrize("name", FACTORS)
def test_rows_are_expanded_to_the_very_weights(name: str) -> None:
    blocks = shared_factors(name)
    ids_R = torch.tensor([3, 69, 0, 33, 16])
    assert torch.equal(expanded_rows(packed(blocks), ids_R), blocks.expand()[ids_R])


@needs_kernels
@pytest.mark.parametrize("name", FACTORS)
def test_rows_can_be_chosen_from_what_is_packed(name: str) -> None:
    matrix, x_RI = packed(shared_factors(name)), torch.randn(2, INPUTS)
    ids_R = torch.tensor([3, 69, 0, 33, 16])
    chosen = chosen_rows(matrix, ids_R)
    assert chosen.kind == matrix.kind
    assert torch.equal(product(chosen, x_RI), product(matrix, x_RI)[:, ids_R])


@pytest.mark.parametrize("name", FACTORS)
def test_blocks_that_are_joined_keep_their_factors(name: str) -> None:
    parts = [shared_factors(name, seed, 32) for seed in (1, 2)]
    expected = [part.expand() for part in parts]
    joined = joined_blocks(parts)
    assert torch.equal(joined.expand(), torch.cat(expected))
    assert KINDS[joined.kind] == KINDS[parts[0].kind]
    mixed = joined_blocks([parts[0], replace(parts[1], factors=())])
    assert torch.equal(mixed.expand(), torch.cat(expected))
    assert "256" not in KINDS[mixed.kind]
    assert "256" in KINDS[interleaved_blocks(*parts).kind]
