"""Estimates made while decoding: acceptance, costs, and which sources pay."""

import random

import pytest

from medusa_kit.drafters.estimates import MAX_CERTAIN, AcceptanceEstimate
from medusa_kit.drafters.first_chances import first_chances
from medusa_kit.drafters.mixed.chooser import LONGEST_WAIT, SHORTEST_WAIT, Chooser
from medusa_kit.infer.node_choice.cost import StepCost


def test_measured_chances_count_in_place_of_a_drafters_own_estimate() -> None:
    estimate = AcceptanceEstimate({("suffix", 2): 0.1})
    assert estimate.chance(("suffix", 2), 0.8) == pytest.approx(0.1)
    assert estimate.chance(("suffix", 3), 0.8) == pytest.approx(0.8)
    for _ in range(200):
        estimate.record(("suffix", 2), right=True)
    assert estimate.chance(("suffix", 2), 0.8) > 0.9


def test_a_few_lucky_guesses_move_a_measured_chance_less_than_an_estimated_one() -> None:
    estimate = AcceptanceEstimate({"measured": 0.1})
    for key in ("measured", "estimated"):
        for _ in range(3):
            estimate.record(key, right=True)
    assert estimate.chance("measured", 0.1) < 0.25 < estimate.chance("estimated", 0.1)


def test_the_shipped_table_is_read() -> None:
    """Long matches are right more often than short ones, likelier tokens more often than others."""
    chances = first_chances()
    assert all(0 <= chance <= 1 for chance in chances.values())
    assert {name for name, *_ in chances} == {"suffix", "recycling", "prompt-lookup"}
    assert chances["recycling", 0, 1] > chances["recycling", 1, 1] > chances["recycling", 2, 1]
    assert chances["prompt-lookup", 8, 1] > 0.5 > chances["prompt-lookup", 1, 1]


def test_luck_starts_from_what_is_believed_and_ends_at_what_is_seen() -> None:
    acceptance, draw = AcceptanceEstimate(), random.Random(0)
    assert acceptance.chance("copy", 0.3) == pytest.approx(0.3)
    for _ in range(2000):
        acceptance.record("copy", draw.random() < 0.7)
    assert acceptance.chance("copy", 0.1) == pytest.approx(0.7, abs=0.06)
    assert acceptance.chance("other", 0.1) == pytest.approx(0.1)


def test_luck_follows_a_text_that_changes_and_is_never_certain() -> None:
    acceptance = AcceptanceEstimate()
    for _ in range(1000):
        acceptance.record("copy", True)
    assert acceptance.chance("copy", 0.5) == MAX_CERTAIN
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


@pytest.mark.parametrize("pays", [True, False])
def test_the_chooser_asks_where_it_pays_and_almost_never_where_it_does_not(pays: bool) -> None:
    """Heads gain 0.1 tokens a step on average, or lose as much, and single steps much more."""
    chooser, draw, asked = Chooser([0.0, 0.5]), random.Random(2), 0
    for step in range(1500):
        situation, choice = chooser.choose(1.0)
        gain = draw.choice([0.6, -0.2, -0.1]) if pays else draw.choice([0.3, -0.3, -0.3])
        chooser.record(situation, choice, gain)
        asked += choice if step >= 300 else 0
    share = asked / 1200
    assert share > 0.8 if pays else share < 0.05


def test_rests_bring_the_next_try_nearer_and_a_try_is_a_run() -> None:
    """The first step of a run is not counted, however long it took."""
    chooser, choices = Chooser([0.0, 0.5]), list[int]()

    def step() -> None:
        situation, choice = chooser.choose(1.0)
        first = choice and (not choices or not choices[-1])
        choices.append(choice)
        chooser.record(situation, choice, -9.0 if first else 0.5)

    for _ in range(8):
        situation, _ = chooser.choose(1.0)
        chooser.record(situation, 1, -0.5)  # heads seem to lose
    for _ in range(60):
        step()
        for _ in range(0 if choices[-1] else 15):
            chooser.rested()
    first = choices.index(1)
    assert 16 * (first - 1) <= LONGEST_WAIT <= 16 * (first + 1)  # each step with its rests
    assert choices[first : first + 4] == [1] * 4
    assert sum(choices[first:]) > 0.5 * len(choices[first:])


def test_situations_are_apart() -> None:
    """Where the free guesses already promise much, asking is a waste; elsewhere it pays."""
    chooser, draw, asked = Chooser([0.0, 0.5]), random.Random(3), {1.0: 0, 4.0: 0}
    for step in range(2000):
        promised = draw.choice([1.0, 4.0])
        situation, choice = chooser.choose(promised)
        chooser.record(situation, choice, 0.3 if promised == 1.0 else -0.5)
        asked[promised] += choice if step >= 500 else 0
    assert asked[1.0] > 600
    assert asked[4.0] < 60
    assert chooser.pays()


def test_a_source_that_begins_to_pay_is_found_again() -> None:
    chooser, late = Chooser([0.0, 0.5]), 0
    for step in range(4000):
        situation, choice = chooser.choose(1.0)
        chooser.record(situation, choice, 0.7 if step > 1500 else -0.3)
        late += choice if step >= 3500 else 0
    assert late > 400


def steps_until_asked(gain: float, new_text: bool) -> int:
    chooser = Chooser([0.0, 0.5])
    for _ in range(1000):
        situation, choice = chooser.choose(1.0)
        chooser.record(situation, choice, gain)
    assert not chooser.pays()
    if new_text:
        chooser.new_text()
    for step in range(2 * LONGEST_WAIT):
        situation, choice = chooser.choose(1.0)
        if choice:
            return step
        chooser.record(situation, choice)
    raise AssertionError("never asked again")


def test_in_another_text_what_lost_a_little_is_tried_soon() -> None:
    assert steps_until_asked(-0.02, new_text=True) <= SHORTEST_WAIT
    assert steps_until_asked(-0.02, new_text=False) > SHORTEST_WAIT


def test_what_loses_much_is_tried_rarely_in_many_short_texts() -> None:
    chooser, asked = Chooser([0.0, 0.5]), 0
    for _ in range(100):
        chooser.new_text()
        for _ in range(40):
            situation, choice = chooser.choose(1.0)
            chooser.record(situation, choice, -0.5)
            asked += choice
    assert asked < 0.02 * 4000


def test_a_hiccup_of_the_machine_counts_for_twice_the_usual_time() -> None:
    chooser = Chooser([0.0, 0.5, 0.5])
    assert [chooser.took(1, 0.1) for _ in range(3)] == pytest.approx([0.1] * 3)
    assert chooser.took(1, 60.0) == pytest.approx(0.2)
    assert chooser.took(1, 0.1) == pytest.approx(0.1)
    assert chooser.took(2, 60.0) == pytest.approx(60.0)  # of another source
