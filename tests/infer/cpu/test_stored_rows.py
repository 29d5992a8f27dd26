"""Rows of GGUF files are packed from their blocks: the bytes and digests of the numbers' way."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.gguf_blocks import blocks_in_order, read_factors, read_scales
from medusa_kit.infer.cpu.packed.packing import (
    Rows,
    alike,
    can_join,
    interleaved_rows,
    joined,
    kind_of,
    packed_rows,
)
from medusa_kit.infer.cpu.packed.stored_rows import TYPES, StoredRows, stored_rows

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)
OUTPUTS, INPUTS = 70, 512  # panels that are not full
HALVES = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}


class Stored:
    """What `read_scales` reads."""

    def __init__(self, data: np.ndarray, stored: str) -> None:
        self.data, self.tensor_type = data, gguf.GGMLQuantizationType[stored]


def random_bytes(stored: str, seed: int = 0, rows: int = OUTPUTS, inputs: int = INPUTS) -> Any:
    """Any codes and scales; some factors are zero of either sign, or have no leading bit."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored]]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, inputs // numbers, size), dtype=np.uint8)
    for at in HALVES.get(stored, [0]):
        halves = generator.normal(0, 2, data.shape[:2]).astype(np.float16)
        halves[0, 0], halves[1, -1], halves[2, 0], halves[3, 0] = 0.0, -0.0, 2.0**-24, -(2.0**-15)
        data[..., at : at + 2] = halves[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def numbers_of(data: np.ndarray, stored: str) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[stored]))


def by_numbers(data: np.ndarray, stored: str) -> Rows:
    """As they are packed from their numbers."""
    chosen = Stored(data, stored)
    scales, factors = read_scales(chosen, len(data)), read_factors(chosen, len(data))
    assert scales is not None
    blocks = blocks_in_order(numbers_of(data, stored), *scales, 1, factors)
    assert blocks is not None
    return blocks


def from_file(data: np.ndarray, stored: str, order: torch.Tensor | None = None) -> StoredRows:
    order = torch.arange(len(data)) if order is None else order
    others = lambda: by_numbers(data[order.numpy()], stored)  # noqa: E731
    rows = stored_rows(data, stored, INPUTS, order, others)
    assert rows is not None
    return rows


def assert_same_bytes(rows: Rows, expected: Rows) -> None:
    kind = kind_of(expected)
    assert isinstance(rows, StoredRows)
    assert kind_of(rows) == kind
    assert torch.equal(packed_rows(rows, kind), packed_rows(expected, kind))


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_packed_bytes_are_those_of_the_numbers(stored: str, seed: int) -> None:
    data = random_bytes(stored, seed)
    assert_same_bytes(from_file(data, stored), by_numbers(data, stored))


@pytest.mark.parametrize("stored", TYPES)
def test_numbers_are_those_of_the_gguf_package(stored: str) -> None:
    """Their digest is the model's, so a zero keeps its sign."""
    data = random_bytes(stored)
    found = torch.cat(list(from_file(data, stored).numbers())).view(torch.int16)
    expected = numbers_of(data, stored).flatten().bfloat16().view(torch.int16)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize(
    "arrange",
    [lambda a, b: joined([a, b]), interleaved_rows],
    ids=["joined", "interleaved"],
)
def test_rows_of_two_tensors(stored: str, arrange: Callable[[Rows, Rows], Rows]) -> None:
    first, second = random_bytes(stored, 1), random_bytes(stored, 2)
    rows = arrange(from_file(first, stored), from_file(second, stored))
    assert_same_bytes(rows, arrange(by_numbers(first, stored), by_numbers(second, stored)))


def test_rows_in_another_order() -> None:
    data = random_bytes("Q4_K")
    order = torch.arange(OUTPUTS).view(-1, 2).T.flatten()
    rows = from_file(data, "Q4_K", order)
    assert_same_bytes(rows, by_numbers(data[order.numpy()], "Q4_K"))


@pytest.mark.parametrize("other", ["Q5_K", "Q6_K"])
def test_tensors_of_two_types(other: str) -> None:
    """As in Q4_K_M and Q5_K_M: a form that holds both, where there is one."""
    data = {"Q4_K": random_bytes("Q4_K", 1), other: random_bytes(other, 2)}
    stored = [from_file(part, name) for name, part in data.items()]
    expected = [by_numbers(part, name) for name, part in data.items()]
    assert can_join(stored) == can_join(expected) == (alike(expected) is not None)
    ours, theirs = joined(stored), joined(expected)
    kind = kind_of(theirs)
    assert kind_of(ours) == kind
    assert torch.equal(packed_rows(ours, kind), packed_rows(theirs, kind))


def test_a_wider_form_is_packed_from_the_numbers() -> None:
    """Where another piece of the matrix needs it."""
    data = random_bytes("Q4_0")
    for kind in (0, 2, 4):
        rows, expected = from_file(data, "Q4_0"), by_numbers(data, "Q4_0")
        assert torch.equal(packed_rows(rows, kind), packed_rows(expected, kind))


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_left_to_the_numbers(stored: str, number: float) -> None:
    for at in HALVES.get(stored, [0]):
        data = random_bytes(stored)
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored]][1]
        data[-1, -size + at : data.shape[1] - size + at + 2] = np.array([number], np.float16).view(
            np.uint8
        )
        rows = stored_rows(data, stored, INPUTS, torch.arange(OUTPUTS), lambda: None)
        assert rows is None


def test_five_bits_of_which_four_are_used() -> None:
    data = random_bytes("Q5_K").reshape(OUTPUTS, -1, 176)
    data[..., 16:48] = 0
    rows = stored_rows(
        data.reshape(OUTPUTS, -1), "Q5_K", INPUTS, torch.arange(OUTPUTS), lambda: None
    )
    assert rows is None
