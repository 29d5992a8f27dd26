"""Packed linear layers give plain products, for packed row counts and for all others."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from medusa_kit.infer.cpu import mkl_linear as packed_linear
from medusa_kit.infer.cpu.mkl_linear import (
    PackedLinear,
    _packed_rows,
    install_packed_linears,
    pack_for_rows,
)

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 8, bias=False)).to(dtype)


@needs_mkl
@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65])
def test_products_are_those_of_the_weight(rows: int) -> None:
    model = small_model()
    names = list(model.state_dict())
    first, last = model[0], model[2]
    assert install_packed_linears(model)
    pack_for_rows(model, rows)
    fewer = max(rows // 2, 1)  # a batch whose rows finish one after the other
    for shape in ((rows, 24), (1, rows, 24), (rows, 1, 24), (rows + 1, 24), (fewer, 24)):
        x = torch.randn(*shape)
        expected = F.silu(x.double() @ first.weight.double().T + first.bias.double())
        expected = expected @ last.weight.double().T
        with torch.inference_mode():
            out = model(x)
        assert out.shape == (*shape[:-1], 8)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    assert list(model.state_dict()) == names
    assert model[0] is first


@needs_mkl
def test_only_the_last_row_counts_asked_for_are_kept() -> None:
    model = small_model()
    install_packed_linears(model)
    for rows in (4, 8, 16, 1):  # one row is never packed
        pack_for_rows(model, rows)
        model(torch.randn(rows, 24).requires_grad_(False))
    assert [list(layer.packs) for layer in (model[0], model[2])] == [[8, 16]] * 2


@needs_mkl
def test_fewer_rows_use_the_nearest_larger_pack() -> None:
    model = small_model()
    install_packed_linears(model)
    for rows in (6, 20):
        pack_for_rows(model, rows)
    used = [_packed_rows(model[0].packs, rows) for rows in (1, 2, 3, 6, 7, 9, 10, 20, 21, 64)]
    assert used == [None, None, 6, 6, None, None, 20, 20, None, None]


@needs_mkl
def test_gradients_pass_through() -> None:
    model = small_model()
    install_packed_linears(model)
    pack_for_rows(model, 4)
    x = torch.randn(4, 24, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_other_dtypes_and_no_memory_leave_the_model_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    half = small_model(torch.bfloat16)
    assert not install_packed_linears(half)
    assert not install_packed_linears(nn.Sequential(nn.ReLU()))
    monkeypatch.setattr(packed_linear, "free_memory", lambda: 1000)
    model = small_model()
    if torch.backends.mkl.is_available():
        assert not packed_linear.fits_in_memory(model)
        assert "stay unpacked" in capsys.readouterr().err
    assert not any(isinstance(layer, PackedLinear) for layer in (*half, *model))


def test_free_memory_is_some() -> None:
    assert 1_000_000 < packed_linear.free_memory() < 10**14
