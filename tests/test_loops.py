"""Where an answer begins to repeat one span over and over."""

import random

import pytest

from medusa_kit.loops import LEAST, loop_start, too_many


def by_hand(ids: list[int]) -> int | None:
    for period in range(1, len(ids) // 3 + 1):
        start = len(ids)
        while start - period > 0 and ids[start - 1] == ids[start - 1 - period]:
            start -= 1
        if len(ids) - start >= max(2 * period, LEAST):
            return start
    return None


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], None),
        ([7], None),
        ([1, 2, 3, *[9] * (LEAST + 1)], 4),
        ([1, 2, 3, *[9] * LEAST], None),  # too short a row
        ([5, 6, *[1, 2, 3, 4] * 9], 6),
        ([5, 6, *[1, 2, 3, 4] * 9, 1, 2], 6),  # cut off
        ([*[1, 2, 3, 4] * 9, 0], None),  # it ended by itself
        ([*range(40), *range(40)], None),  # twice is a quotation
        ([*range(40), *range(40), *range(40)], 40),
    ],
)
def test_examples(ids: list[int], expected: int | None) -> None:
    assert loop_start(ids) == expected


def test_against_counting_by_hand() -> None:
    draw, found = random.Random(0), 0
    for _ in range(400):
        head = [draw.randrange(3) for _ in range(draw.randrange(60))]
        span = [draw.randrange(3) for _ in range(draw.randrange(1, 30))]
        ids = head + (span * 20)[: draw.randrange(200)]
        assert loop_start(ids) == by_hand(ids)
        found += by_hand(ids) is not None
    assert 100 < found < 390


def test_many_looping_answers_are_told() -> None:
    assert too_many(2, 8) is None
    assert too_many(0, 0) is None
    assert (said := too_many(3, 8)) is not None
    assert said.startswith("3 of 8 answers to train on end in a loop")
