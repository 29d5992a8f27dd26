"""What tests of attention backends share."""

import pytest

from medusa_kit.infer.attention import flash, triton_backend


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU of capability 9.0 with triton, without flash-attn."""
    for module in (flash, triton_backend):
        monkeypatch.setattr(module, "compute_capability", lambda index: (9, 0))
    monkeypatch.setattr(flash, "package", lambda *device: None)
    monkeypatch.setattr(triton_backend, "missing", lambda: None)
