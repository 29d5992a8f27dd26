"""Each test has a cache folder of its own, of which this process knows nothing."""

from pathlib import Path

import pytest

from medusa_kit.store import records


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    for name in ("_told", "_digests", "_not_writable"):  # what this process knows already
        monkeypatch.setattr(records, name, type(getattr(records, name))())
    return tmp_path / "cache"
