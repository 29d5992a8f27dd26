"""When a draft stops."""

import random

import pytest

from medusa_kit.drafters.draft_model.lengths import Heuristic, Threshold, lengths_for
from medusa_kit.settings.drafters import DraftModelOptions


def test_heuristic_two_more_after_a_whole_draft_one_less_after_any_other() -> None:
    first, second = (Heuristic(4, 10).of_request() for _ in range(2))
    for accepted, expected in ((4, 6), (6, 8), (8, 10), (10, 10), (3, 9), (9, 10)):
        first.observe(first.limit, accepted)
        assert first.limit == expected
    assert second.limit == 4
    for _ in range(6):
        second.observe(second.limit, 0)
    assert second.limit == 1
    assert first.of_request().limit == 4


@pytest.mark.parametrize("overconfident", [1.0, 2.0, 0.5])
def test_the_threshold_settles_where_the_last_token_is_worth_its_time(overconfident: float) -> None:
    """Whether the draft's chances are right, too high or too low."""
    draw, cost = random.Random(0), 0.2
    lengths = Threshold(0.4, 20, cost)
    lasts, targets = [], []
    for step in range(6000):
        drafted, right, accepted, chance = 0, True, 0, 1.0
        while drafted < lengths.longest:
            true = draw.random() ** 0.2
            chance *= true ** (1 / overconfident)
            right = right and draw.random() < true
            drafted, accepted = drafted + 1, accepted + right
            if lengths.stops(chance):
                break
        lengths.observe(drafted, accepted)
        if step > 2000:
            lasts.append(accepted == drafted)
            targets.append(lengths.target)
    assert sum(lasts) / len(lasts) == pytest.approx(sum(targets) / len(targets), abs=0.05)
    assert 0.2 < targets[-1] < 0.6


def test_a_threshold_that_does_not_adapt_stays() -> None:
    lengths = lengths_for(DraftModelOptions(threshold=0.3, adapt=False), cost=0.1)
    assert isinstance(lengths, Threshold)
    for _ in range(50):
        lengths.observe(3, 0)
    assert lengths.threshold == 0.3
    assert lengths.stops(0.29)
    assert not lengths.stops(0.3)
    assert not lengths_for(DraftModelOptions(threshold=0), 0.1).stops(0.0)
