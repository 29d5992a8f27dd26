"""What a sample of combinations leaves out, and that all of them can be asked for."""

from itertools import product

import pytest
from support.samples import pairs

FEW, MANY = ["llama", "gemma3"], ["medusa", "dynamic", "hydra", "recurrent", "plain"]


@pytest.mark.parametrize(("first", "second"), [(FEW, MANY), (MANY, FEW), (MANY, MANY)])
def test_each_value_runs_and_none_without_need(first: list[str], second: list[str]) -> None:
    picked = pairs(first, second, every=False)
    assert {one for one, _ in picked} == set(first)
    assert {other for _, other in picked} == set(second)
    assert len(set(picked)) == len(picked) == len(MANY)
    assert picked == pairs(first, second, every=False)


def test_every_combination_when_asked() -> None:
    assert pairs(FEW, MANY, every=True) == list(product(FEW, MANY))
