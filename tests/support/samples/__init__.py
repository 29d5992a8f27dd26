"""Which combinations of two parameters run: a seeded sample, or all of them."""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

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
