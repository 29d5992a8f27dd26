"""Packed weights, remembered checks and the files of tiny models stay in pytest's own folder."""

from collections.abc import Iterator

import pytest
from support.checked_once import checked_once  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_KIT_CACHE", str(tmp_path_factory.getbasetemp() / "rounded"))
        yield
