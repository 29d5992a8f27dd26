"""Packed linear layers give plain products, for packed row counts and for all others."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from medusa_kit.infer import mkl_linear as packed_linear
from medusa_kit.infer.mkl_linear import (
    PackedLinear,
    _packed_rows,
    forget_packs,
    install_packed_linears,
    pack_for_rows,
    using_packs,
)

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")


@pytest.fixture(autouse=True)
def in_use() -> Iterator[None]:
    """Layers are called as steps call them."""
    with using_packs():
        yield


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 8, bias=False)).to(dtype)


@needs_mkl
@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65])
def test_products_are_those_of_the_weight(rows: int) -> None:
    model = small_model()
    names = list(model.state_dict())
    first, last = model[0], model[2]
    assert install_packed_linears(model)
    pack_for_rows(model.modules(), rows)
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
        pack_for_rows(model.modules(), rows)
        with torch.inference_mode():
            model(torch.randn(rows, 24))
    assert [list(layer.packs) for layer in (model[0], model[2])] == [[8, 16]] * 2


@needs_mkl
def test_fewer_rows_use_the_nearest_larger_pack() -> None:
    model = small_model()
    install_packed_linears(model)
    for rows in (6, 20):
        pack_for_rows(model.modules(), rows)
    used = [_packed_rows(model[0].packs, rows) for rows in (1, 2, 3, 6, 7, 9, 10, 20, 21, 64)]
    assert used == [None, None, 6, 6, None, None, 20, 20, None, None]


@needs_mkl
def test_gradients_pass_through() -> None:
    model = small_model()
    install_packed_linears(model)
    pack_for_rows(model.modules(), 4)
    x = torch.randn(4, 24, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


WRITES = {
    "in place": lambda layer: layer.weight.mul_(-1.5),
    "replaced": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * -1.5)),
    "storage": lambda layer: setattr(layer.weight, "data", layer.weight.data * -1.5),
    "by data": lambda layer: (layer.weight.data.mul_(-1.5), forget_packs(layer)),
}


@needs_mkl
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("rows", [6, 5])
def test_a_weight_that_was_written_to_is_packed_anew(write: str, rows: int) -> None:
    layer = nn.Linear(24, 40)
    install_packed_linears(layer)
    pack_for_rows(layer.modules(), 6)
    x = torch.randn(rows, 24)
    with torch.inference_mode():
        layer(x)
    with torch.no_grad():
        WRITES[write](layer)
    with torch.inference_mode():
        out = layer(x)
    torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias).detach())


@needs_mkl
@pytest.mark.parametrize("rows", [6, 5])
def test_weights_get_gradients_after_steps(rows: int) -> None:
    layer = nn.Linear(24, 40)
    install_packed_linears(layer)
    pack_for_rows(layer.modules(), 6)
    x = torch.randn(rows, 24)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(40, -1))


@needs_mkl
def test_copies_pack_for_themselves() -> None:
    model = small_model()
    install_packed_linears(model)
    pack_for_rows(model.modules(), 4)
    x = torch.randn(4, 24)
    with torch.inference_mode():
        expected = model(x)
    twin = copy.deepcopy(model)
    with torch.inference_mode():
        torch.testing.assert_close(twin(x), expected)
    assert all(layer.packs[4] is not None for layer in (model[0], twin[0]))


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
