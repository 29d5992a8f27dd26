"""The rule by which sources are asked: what gains, and now and then what loses."""

import random

import pytest

from medusa_kit.drafters.mixed.explorer import Explorer, Overheads


def used(explorer: Explorer, steps: int, *gains: float, spread: float = 0.0) -> list[int]:
    """How often each choice was made, where it gains so much on average."""
    draw, counts = random.Random(2), [0] * (1 + len(gains))
    for _ in range(steps):
        choice = explorer.choose()
        counts[choice] += 1
        gain = gains[choice - 1] + draw.choice([-spread, spread]) if choice else 0.0
        explorer.record(choice, gain)
    return counts


@pytest.mark.parametrize("gain", [0.1, -0.1])
def test_what_gains_is_asked_and_what_loses_is_not(gain: float) -> None:
    """Single steps gain and lose much more."""
    explorer = Explorer([0.5])
    used(explorer, 300, gain, spread=0.4)
    share = used(explorer, 2000, gain, spread=0.4)[1] / 2000
    assert share > 0.8 if gain > 0 else share < 0.1


@pytest.mark.parametrize("lost", [0.01, 0.1, 0.5, 3.0])
def test_tries_cost_a_small_share_whatever_is_lost(lost: float) -> None:
    explorer = Explorer([0.0])
    used(explorer, 500, -lost)
    assert used(explorer, 10_000, -lost)[1] * lost < 0.01 * 10_000


def test_plain_steps_are_tried_too_where_a_source_gains() -> None:
    explorer = Explorer([0.2])
    plain, _ = used(explorer, 5000, 0.2)
    assert 0 < 0.2 * plain < 0.01 * 5000


def test_of_several_the_best_is_asked() -> None:
    explorer = Explorer([0.5, 0.5])
    used(explorer, 500, 0.1, 0.4)
    assert used(explorer, 2000, 0.1, 0.4)[2] > 1800


def test_a_source_that_begins_to_gain_is_found_again() -> None:
    explorer = Explorer([0.5])
    used(explorer, 1500, -0.3)
    used(explorer, 2500, 0.7)
    assert used(explorer, 500, 0.7)[1] > 400


def test_another_text_is_learned_sooner_than_a_change_within_one() -> None:
    def steps_until_left_out(new_text: bool) -> int:
        explorer, steps = Explorer([0.5]), 0
        used(explorer, 2000, 0.3)
        if new_text:
            explorer.new_text()
        while used(explorer, 1, -0.2)[1]:
            steps += 1
        return steps

    assert 0 < steps_until_left_out(new_text=True) < 0.5 * steps_until_left_out(new_text=False)


def test_a_try_is_several_steps_in_a_row() -> None:
    explorer, choices = Explorer([-0.1]), list[int]()
    for _ in range(200):
        choices.append(explorer.choose())
        explorer.record(choices[-1], -0.1)
    runs = "".join(map(str, choices)).split("0")
    assert {len(run) for run in runs if run} == {4}


def test_nothing_is_tried_in_the_first_steps_however_little_that_seems_to_lose() -> None:
    """So an answer of a few dozen tokens has what is known to be best."""
    assert used(Explorer([0.001]), 40, 0.001) == [0, 40]
    assert used(Explorer([-0.001]), 40, -0.001) == [40, 0]


def test_what_is_known_now_goes_before_what_was_recorded() -> None:
    explorer = Explorer([0.5])
    used(explorer, 20, 0.5)
    explorer.expect(1, -0.1)
    assert explorer.choose() == 0
    explorer.expect(1, 0.1)
    assert explorer.choose() == 1


def test_what_is_favoured_may_lose_a_little() -> None:
    assert used(Explorer([0.0], favour=0.01), 40, -0.005) == [0, 40]
    assert used(Explorer([0.0], favour=0.01), 400, -0.1)[1] < 40


@pytest.mark.parametrize("drafts", [True, False])
def test_an_overhead_is_the_usual_one_beyond_another(drafts: bool) -> None:
    """Of drafting, or of what it displaces."""
    overheads = Overheads()

    def record(kind: str, seconds: float) -> None:
        overheads.record(kind, seconds * drafts, seconds * (not drafts), 1.0)

    assert overheads.more("heads", "plain") == 0.0
    for kind, usual in (("plain", 0.1), ("heads", 0.4)):
        record(kind, 50.0)  # the first warms up
        assert overheads.more(kind, "never") <= 0.5
        for _ in range(300):
            record(kind, usual)
    assert overheads.more("heads", "plain") == pytest.approx(0.3, abs=0.01)
    assert overheads.drafting("heads") == pytest.approx(0.4 * drafts, abs=0.01)
    record("heads", 60.0)  # a hiccup
    record("plain", -60.0)  # a clock that jumps, or a machine that is fast again
    assert 0.28 < overheads.more("heads", "plain") < 0.36
