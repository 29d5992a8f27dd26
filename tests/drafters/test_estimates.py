"""Estimates made while decoding: how often draft tokens are right, and what steps cost."""

import random

import pytest

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.infer.decode.node_choice.cost import StepCost


def test_luck_starts_from_what_is_believed_and_ends_at_what_is_seen() -> None:
    acceptance, draw = AcceptanceEstimate(), random.Random(0)
    assert acceptance.chance("copy", 0.3) == pytest.approx(0.3)
    for _ in range(2000):
        acceptance.record("copy", draw.random() < 0.7)
    assert acceptance.chance("copy", 0.1) == pytest.approx(0.7, abs=0.08)
    assert acceptance.chance("other", 0.1) == pytest.approx(0.1)


def test_luck_follows_a_text_that_changes_and_is_never_certain() -> None:
    acceptance = AcceptanceEstimate()
    for _ in range(1000):
        acceptance.record("copy", True)
    assert acceptance.chance("copy", 0.5) > 0.95
    for _ in range(600):
        acceptance.record("copy", False)
    assert acceptance.chance("copy", 0.5) < 0.15


def test_step_cost_believes_its_slope_until_sizes_are_measured() -> None:
    cost = StepCost(slope=0.1)
    assert cost.seconds(11) == pytest.approx(2 * cost.seconds(1))
    for _ in range(3):
        cost.record(1, 0.010)
    assert cost.seconds(1) == pytest.approx(0.010)
    assert cost.seconds(11) == pytest.approx(0.020)


def test_step_cost_learns_another_slope_and_speaks_of_sizes_between() -> None:
    cost, draw = StepCost(slope=0.1), random.Random(1)
    for _ in range(200):
        nodes = draw.choice([1, 2, 4, 12])
        cost.record(nodes, 0.010 * (1 + 0.02 * (nodes - 1)) * draw.uniform(0.9, 1.1))
    assert cost.seconds(12) == pytest.approx(0.0122, rel=0.1)
    assert cost.seconds(8) == pytest.approx(0.0114, rel=0.1)  # never seen


def test_a_hiccup_of_the_machine_is_not_taken_for_the_cost() -> None:
    cost = StepCost(slope=0.1)
    for _ in range(20):
        cost.record(1, 0.010)
    cost.record(1, 1.0)
    assert cost.seconds(1) < 0.013
