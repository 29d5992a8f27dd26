"""float32 matrix products on a CPU by oneDNN instead of MKL.

MKL computes with half the vector width on processors that are not Intel's. torch gives products to
oneDNN only where lower precision is allowed. oneDNN then uses it on some processors (those with
AMX) and computes in float32 on others, twice as fast as MKL on some. So it is allowed where a
product shows that the precision stays that of float32.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch

SIZE = 256
ALLOWED = 2e-6  # relative error; float32 has some 2e-7 here, 16 bits 2e-3


@contextlib.contextmanager
def by_onednn(device: torch.device) -> Iterator[None]:
    """Inside, products on this device are oneDNN's where that is as accurate."""
    before = _precision()
    if device.type != "cpu" or before != "highest":
        yield
        return
    _set_precision("medium")
    try:
        if error_of_products() > ALLOWED:
            _set_precision(before)
        yield
    finally:
        _set_precision(before)


def _precision() -> str:
    with warnings.catch_warnings():  # torch 2.9 for CUDA advises others
        warnings.simplefilter("ignore")
        return torch.get_float32_matmul_precision()


def _set_precision(precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(precision)


def error_of_products() -> float:
    """The relative error of float32 products as they are computed now."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, dtype=torch.float32, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    found = [a @ b, torch.nn.functional.linear(a, b.t().contiguous())]
    return max(float((one.double() - exact).norm() / exact.norm()) for one in found)


def fast_in_bfloat16(device: torch.device) -> bool:
    """Whether the device has products in bfloat16; elsewhere they take longer than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
