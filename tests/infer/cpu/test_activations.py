"""Products with activations of 16 and 8 bits: what is rounded, on every instruction set.

Shapes: R rows, O outputs, I inputs, Q groups, S inputs of a group.
"""

import ctypes
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.compiled import ARM_LACKING, library_for, products_on_arm
from support.kernels.forms import DIGITS, ROWS, Form, form_of, forms

from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.packing import Blocks

FEW = {name: digits for name, digits in DIGITS.items() if digits < 3}
FORMS = {form.name: form for form in forms()}
NATIVE = kernels.load_library()
pytestmark = pytest.mark.skipif(
    NATIVE is None or not kernels.has_integers(NATIVE), reason="no integers are multiplied here"
)
PARTS = ((ROWS, 2), *itertools.product((1, 2, 3, 4, 7, 8, 9), (1, 3)))  # rows, threads


def multiply(
    form: Form, digits: int, x_RI: torch.Tensor, threads: int = 2, by: Any = NATIVE
) -> Any:
    matrix, out_RO = form.with_digits(digits), torch.empty(len(x_RI), form.matrix.struct.outputs)
    pointers = x_RI.data_ptr(), len(x_RI), out_RO.data_ptr()
    by.mk_linear(ctypes.byref(matrix.struct), *pointers, threads)
    return out_RO


def rounded(x_RI: torch.Tensor, group: int, digits: int) -> torch.Tensor:
    """The numbers that the kernels are to multiply, in float64, by the rule of integers.h."""
    x_RQS = x_RI.unflatten(1, (-1, group))
    most_RQ1 = x_RQS.abs().amax(-1, keepdim=True)
    if digits == 1:
        step_RQ1 = most_RQ1.clamp_min(1e-30) * torch.tensor(1 / 127)
        bits = step_RQ1.view(torch.int32)
        step_RQ1 = ((bits + 255) & ~255).view(torch.float32)
        whole = (x_RQS * (1 / step_RQ1)).round()
    else:
        exponent = torch.frexp(most_RQ1.clamp_min(1e-30) * torch.tensor(1.004)).exponent
        step_RQ1 = torch.ldexp(torch.ones_like(most_RQ1), exponent - (8 * digits - 1))
        whole = (x_RQS / step_RQ1).round()
    return (whole.double() * step_RQ1.double()).flatten(1)


@pytest.mark.parametrize("digits", FEW.values(), ids=FEW)
@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_the_rounded_numbers(name: str, digits: int) -> None:
    form = FORMS[name]
    group = 16 if "by 16" in name or name == "Q6_K" else 32
    x_RI = form.x_RI.clone()
    x_RI[3] *= 1e-12
    weight_OI, rounded_RI = form.weight_OI.double(), rounded(x_RI, group, digits)
    error_RI = (rounded_RI - x_RI.double()).abs().unflatten(1, (-1, group))
    most_RQ = x_RI.double().abs().unflatten(1, (-1, group)).amax(-1, keepdim=True)
    assert (error_RI <= most_RQ * (1 / 253 if digits == 1 else 2.0**-15)).all()
    out_RO = multiply(form, digits, x_RI).double()
    additions = 2 * most_RQ.shape[1] + 2
    summed_RO = additions * 2.0**-24 * (rounded_RI.abs() @ form.size_OI.double().T)
    assert ((out_RO - rounded_RI @ weight_OI.T).abs() <= summed_RO).all()


@pytest.mark.parametrize("digits", FEW.values(), ids=FEW)
@pytest.mark.parametrize("name", FORMS)
def test_a_rows_bits_do_not_depend_on_others(name: str, digits: int) -> None:
    form = FORMS[name]
    x_RI = torch.randn(70, form.weight_OI.shape[1], generator=torch.Generator().manual_seed(7))
    whole_RO = multiply(form, digits, x_RI)
    for rows, threads in itertools.product(range(1, 34), (1, 3)):
        assert torch.equal(multiply(form, digits, x_RI[:rows], threads), whole_RO[:rows])


@pytest.mark.parametrize("digits", FEW.values(), ids=FEW)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 3e38, -3e38, 1.0001 * 2.0**127])
def test_what_is_no_number_does_not_become_one(odd: float, digits: int) -> None:
    for form in FORMS.values():
        x_RI = torch.ones(2, form.weight_OI.shape[1])
        x_RI[1, 40] = odd
        out_RO = multiply(form, digits, x_RI)
        assert out_RO[0].isfinite().all()
        assert not out_RO[1].isfinite().any(), form.name


@pytest.mark.parametrize("digits", FEW.values(), ids=FEW)
@pytest.mark.parametrize("name", ["int4", "int8", "int8 by 16"])
def test_no_sum_overflows(name: str, digits: int) -> None:
    """The largest codes and numbers, all of one sign."""
    blocks = FORMS[name]
    ends = (0, 15) if name == "int4" else (-128, 127)
    group = 16 if "by 16" in name else 32
    for end in ends:
        codes_OI = torch.full(blocks.weight_OI.shape, end, dtype=torch.int8)
        scales_OQ = torch.ones(len(codes_OI), codes_OI.shape[1] // group)
        full = Blocks(codes_OI, scales_OQ, torch.zeros_like(scales_OQ) if name == "int4" else None)
        form = form_of(name, full)
        for number in (1.0, -1.0, 0.99999, 0.75, 0.5078, 1 - 2.0**-8):
            x_RI = torch.full((5, codes_OI.shape[1]), number)
            x_RI[1, ::2], x_RI[2, 1] = 1.0, 1.0
            expected_RO = rounded(x_RI, group, digits) @ form.weight_OI.double().T
            out_RO = multiply(form, digits, x_RI).double()
            assert torch.allclose(out_RO, expected_RO, rtol=1e-6, atol=1e-6 * abs(end))


@pytest.mark.parametrize("isa", ["avx2", "avx-vnni", "avx512-vnni"])
def test_the_same_bits_at_every_level(isa: str) -> None:
    other = library_for(isa)
    assert other.mk_isa().decode() == isa
    for form, digits in itertools.product(FORMS.values(), FEW.values()):
        by_other = multiply(form, digits, form.x_RI, by=other)
        assert torch.equal(by_other, multiply(form, digits, form.x_RI)), form.name


def written(path: Path) -> list[tuple[Form, int]]:
    """Every form with each number of digits, for products_of_file.cpp."""
    pairs = list(itertools.product(FORMS.values(), FEW.values()))
    with path.open("wb") as file:
        file.write(np.array([len(pairs)]).tobytes())
        for form, digits in pairs:
            struct, size = form.matrix.struct, form.matrix.num_bytes
            shape = (struct.kind, struct.outputs, struct.inputs, size, ROWS, len(PARTS), digits)
            file.write(np.array(shape).tobytes())
            file.write(ctypes.string_at(struct.data, size))
            file.write(form.x_RI.numpy().tobytes())
            file.write(np.array(PARTS).tobytes())
    return pairs


@pytest.mark.skipif(bool(ARM_LACKING), reason=f"not installed: {', '.join(ARM_LACKING)}")
def test_the_same_bits_on_arm(tmp_path: Path) -> None:
    pairs = written(tmp_path / "in")
    check_products(pairs, products_on_arm("neon-dot", tmp_path / "in"))


def check_products(pairs: list[tuple[Form, int]], results: torch.Tensor) -> None:
    for form, digits in pairs:
        expected_RO = multiply(form, digits, form.x_RI)
        for rows, _ in PARTS:
            size = rows * expected_RO.shape[1]
            here, results = results[:size], results[size:]
            assert torch.equal(here, expected_RO[:rows].flatten()), (form.name, digits)
    assert not len(results)
