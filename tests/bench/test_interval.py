"""Intervals of paired ratios: published critical values, coverage, outliers, too few pairs."""

import math
import random
from itertools import product

import pytest

from medusa_kit.bench.interval import CONFIDENCE, interval_of


def coverage(count: int, cut: int) -> float:
    """How often the signed-rank sum of `count` pairs lies between, over all signs."""
    sums = [
        sum(rank for rank, positive in enumerate(signs, start=1) if positive)
        for signs in product((False, True), repeat=count)
    ]
    most = count * (count + 1) // 2
    return sum(cut < one < most - cut for one in sums) / len(sums)


@pytest.mark.parametrize("count", [6, 7, 8, 10, 12])
def test_the_interval_is_the_narrowest_with_that_confidence(count: int) -> None:
    """Of powers of two, the mean of each pair has a place of its own among all such means."""
    ratios = [math.exp(1.7**k) for k in range(count)]
    found = interval_of(ratios)
    assert found is not None
    means = sorted((1.7**a + 1.7**b) / 2 for a in range(count) for b in range(a, count))
    cut = min(range(len(means)), key=lambda i: abs(means[i] - math.log(found.low)))
    assert math.log(found.high) == pytest.approx(means[-1 - cut])
    assert coverage(count, cut) >= CONFIDENCE > coverage(count, cut + 1)


def test_too_few_pairs_have_none() -> None:
    assert [interval_of([2.0] * count) for count in range(6)] == [None] * 6
    found = interval_of([2.0] * 6)
    assert found is not None
    assert (found.low, found.ratio, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert not found.holds_one


def test_one_disturbed_pair_moves_the_ratio_little() -> None:
    ratios = [1.2, 1.25, 1.3, 1.22, 1.28, 1.24, 1.26, 1.21, 1.27]
    calm, disturbed = interval_of([*ratios, 1.23]), interval_of([*ratios, 0.01])
    assert calm is not None
    assert disturbed is not None
    assert disturbed.ratio == pytest.approx(calm.ratio, rel=0.02)
    assert disturbed.low < calm.low


def test_an_interval_and_that_of_the_inverse_agree() -> None:
    drawn = random.Random(0)
    ratios = [math.exp(drawn.gauss(0.05, 0.2)) for _ in range(10)]
    found, inverse = interval_of(ratios), interval_of([1 / ratio for ratio in ratios])
    assert found is not None
    assert inverse is not None
    assert found.low == pytest.approx(1 / inverse.high)
    assert found.ratio == pytest.approx(1 / inverse.ratio)
    assert found.holds_one == inverse.holds_one
