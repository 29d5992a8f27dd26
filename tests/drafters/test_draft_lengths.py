"""When a draft stops."""

import random

import pytest

from medusa_kit.drafters.draft_model.lengths import Threshold


@pytest.mark.parametrize("overconfident", [1.0, 2.0, 0.5])
def test_the_threshold_settles_where_the_last_token_is_worth_its_time(overconfident: float) -> None:
    """Whether the draft's chances are right, too high or too low."""
    draw, cost = random.Random(0), 0.2
    lengths = Threshold(0.4, cost)
    lasts, targets = [], []
    for step in range(6000):
        drafted, right, accepted, chance = 0, True, 0, 1.0
        while drafted < 20:
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


def test_a_threshold_of_nothing_stays() -> None:
    lengths = Threshold(0, 0.1)
    for _ in range(50):
        lengths.observe(3, 0)
    assert not lengths.stops(0.0)


def test_a_draft_stops_below_the_threshold() -> None:
    lengths = Threshold(0.3, 0.1)
    assert lengths.stops(0.29)
    assert not lengths.stops(0.3)
