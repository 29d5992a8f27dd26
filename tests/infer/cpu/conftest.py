"""Fixtures for tests of the C++ kernels."""

from collections.abc import Iterator

import pytest

from medusa_kit.infer.cpu.packed import int8_weights


@pytest.fixture(scope="module")
def factors_in_24_bits() -> Iterator[None]:
    """Guesses and scores of heads that are torch's but for rounding. Usually what their weights are
    multiplied by has 8 bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_weights, "DRAFT_DIGITS", 3)
        yield
