"""What a sample of combinations leaves out, and that all of them can be asked for."""

from itertools import combinations, product

import pytest
from support.samples import covering, pairs

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


def test_each_pair_of_many_dimensions_runs_where_it_fits() -> None:
    dimensions = {"a": [1, 2, 3], "b": [[], [1]], "c": ["x", "y", "z"], "d": [True, False]}

    def fits(case: dict) -> bool:
        return not (case["a"] == 3 and case["c"] == "x")

    def pairs_of(cases: list[dict]) -> set[str]:
        return {repr(two) for case in cases for two in combinations(case.items(), 2)}

    every = covering(dimensions, fits, every=True)
    picked = covering(dimensions, fits, every=False)
    assert len(every) == 3 * 2 * 3 * 2 - 4
    assert len(picked) < len(every) / 2
    assert all(map(fits, picked))
    assert pairs_of(picked) == pairs_of(every)
