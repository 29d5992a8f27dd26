"""What tells an error after which a device can do no more."""

import pytest
import torch

from medusa_kit.infer.memory import is_device_lost

ASSERTED = RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")


def accelerator(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    def synchronize() -> None:
        if not works:
            raise ASSERTED

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)


def test_an_error_is_told_from_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_device_lost(ASSERTED)  # there is no device here
    accelerator(monkeypatch, works=True)
    assert not is_device_lost(ASSERTED)
    accelerator(monkeypatch, works=False)
    assert is_device_lost(ASSERTED)
    for other in (ValueError("wrong"), RuntimeError("shape"), MemoryError(),
                  torch.OutOfMemoryError("CUDA error: out of memory")):  # fmt: skip
        assert not is_device_lost(other)
