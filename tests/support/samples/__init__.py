"""Which combinations of parameters run: a seeded sample, or all of them."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

ALL = os.environ.get("MEDUSA_KIT_CASES") == "all"  # make test CASES=all
First, Second = TypeVar("First"), TypeVar("Second")


def pairs(
    first: Sequence[First], second: Sequence[Second], every: bool = ALL
) -> list[tuple[First, Second]]:
    """Each value of both at least once. Where a fault of one combination alone is unlikely: what
    the first chooses runs apart from what the second chooses."""
    if every:
        return [(one, other) for one in first for other in second]
    count, draw = max(len(first), len(second)), random.Random(0)
    columns = [
        [values[place % len(values)] for place in range(count)] for values in (first, second)
    ]
    draw.shuffle(columns[1])
    return list(zip(*columns, strict=True))


Case = dict[str, Any]


def covering(
    dimensions: Mapping[str, Sequence[Any]], fits: Callable[[Case], bool], every: bool = ALL
) -> list[Case]:
    """Each pair of values of two dimensions in one case at least, of those that `fits` allows; or
    all cases."""
    whole = [dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values())]
    cases = [case for case in whole if fits(case)]
    if every:
        return cases
    random.Random(0).shuffle(cases)
    pairs_of = [set(combinations(enumerate(map(repr, case.values())), 2)) for case in cases]
    missing, picked = set().union(*pairs_of), list[Case]()
    while missing:
        one = min(missing)
        some = [index for index, found in enumerate(pairs_of) if one in found][:50]
        best = max(some, key=lambda index: len(pairs_of[index] & missing))
        missing -= pairs_of[best]
        picked.append(cases[best])
    return picked
