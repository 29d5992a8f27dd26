"""The division of the time."""

from types import SimpleNamespace
from typing import Any

import pytest

from medusa_kit.quick import judging, plan, search, settings
from medusa_kit.quick.plan import Rates
from medusa_kit.quick.training import CHECKS, SETTLED, Pace

CHOICES = search.CHOICES  # before fixtures make them small
RATES = Rates(answers=300.0, features=2000.0, updates=4000.0, row_tokens=1.4, answer_length=150.0)


def test_text_and_training_fill_the_time() -> None:
    positions = plan.positions_for(3600.0, RATES)
    spent = positions / RATES.answers + RATES.training(positions, settings.EPOCHS)
    assert spent == pytest.approx(3600.0)
    rest = 3600.0 - positions / RATES.answers
    assert plan.epochs_for(rest, positions, RATES) == pytest.approx(settings.EPOCHS)


def test_answers_that_are_there_take_time_of_training_only() -> None:
    there = 50_000.0
    positions = plan.positions_for(600.0, RATES, there)
    spent = (positions - there) / RATES.answers + RATES.training(positions, settings.EPOCHS)
    assert spent == pytest.approx(600.0)
    assert plan.positions_for(1.0, RATES, there) == there


def test_slower_training_leaves_time_for_less_text() -> None:
    slow = Rates(300.0, 2000.0, 400.0, 1.4, 150.0)
    assert plan.positions_for(600.0, slow) < 0.5 * plan.positions_for(600.0, RATES)
    assert plan.epochs_for(1.0, 50_000.0, RATES) < 0


def test_a_long_run_does_not_bench_for_hours() -> None:
    assert plan.reserved(480.0) == pytest.approx(0.2 * 480)
    assert plan.reserved(10 * 3600.0) == sum(plan.SHARES[name][1] for name in plan.LAST)


def test_rounds_grow_no_faster_than_they_can_be_corrected() -> None:
    assert plan.round_of(1000, 48, first=True) == 48
    assert plan.round_of(5, 48, first=True) == 5
    assert plan.round_of(1000, 48, first=False) == 500
    assert plan.round_of(100, 48, first=False) == 100
    assert plan.round_of(11, 48, first=False) == 0
    assert plan.round_of(-3, 48, first=True) == 0


def test_hours_to_ask_for_are_rounded_up() -> None:
    assert [plan.rounded_up(hours) for hours in (0.1234, 1.01, 25.1)] == ["0.13", "1.1", "26"]
    assert plan.rounded_up(1.23e7) == "13000000"
    assert plan.hours_for(seconds=2880.0, spent=2880.0) == pytest.approx(2.0)


class Training:
    """Updates of some seconds each, paced until they end."""

    def __init__(self, total: float, expected: float) -> None:
        self.now = 0.0
        rate = plan.OVERHEAD * 100 / expected
        self.rates = Rates(300.0, 2000.0, rate, 1.4, 150.0)
        self.total = total
        self.clock = lambda: self.now
        recipe: Any = SimpleNamespace(train=SimpleNamespace(micro_batch_positions=100))
        self.pace = Pace(self, recipe)  # type: ignore[arg-type]

    @property
    def remaining(self) -> float:
        return self.total - self.now

    def run(self, each: float, most: int) -> int:
        step, planned = 0, self.pace(0, most)
        self.planned = planned
        while step < planned:
            self.now += each
            step += 1
            planned = min(max(self.pace(step, planned), step), most)
        return step


@pytest.mark.parametrize("each", [0.25, 0.5, 1.0, 3.0])
def test_training_ends_in_time_whatever_updates_take(
    each: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were expected to take 0.5 s."""
    training = Training(total=1000.0, expected=0.5)
    wanted = 1000.0 - plan.reserved(1000.0)
    done = training.run(each, most=10_000)
    assert training.planned == int(wanted / 0.5)
    assert training.now == pytest.approx(wanted, rel=0.12)
    said = capsys.readouterr().err
    assert said.count(f"an update takes {each:.2f} s: ") == (each != 0.5), "once, not at each step"
    assert done == round(training.now / each)


def test_fewer_updates_than_the_time_allows_where_prompts_ran_out() -> None:
    training = Training(total=1000.0, expected=0.5)
    assert training.run(0.5, most=40) == 40


def test_a_run_that_goes_on_keeps_its_schedule_until_updates_are_timed() -> None:
    training = Training(total=1000.0, expected=0.5)
    training.now = 700.0
    assert training.pace(500, 1600) == 1600
    for step in range(501, 501 + 1600 // CHECKS):
        training.now += 0.5
        planned = training.pace(step, 1600)
    assert 1600 // CHECKS > SETTLED
    assert planned == step + int((800.0 - training.now) / 0.5)


@pytest.mark.parametrize(("tokens", "expected"), [
    (1e9, (128, 20)), (2560.0, (128, 20)), (1280.0, (64, 20)), (64.0, (32, 2)), (-5.0, (32, 1)),
])  # fmt: skip
def test_answers_get_shorter_before_they_get_fewer(
    tokens: float, expected: tuple[int, int]
) -> None:
    assert judging.sized(tokens, 40, 20, min_prompts=1) == expected


def test_fewer_trees_are_timed_where_steps_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CHOICES", CHOICES)
    engine: Any = SimpleNamespace(
        verifier=SimpleNamespace(reads_packed_weights=True, chains_only=False)
    )
    chosen = [search._sizes(engine, step, 30.0) for step in (1e-4, 0.006, 0.02, 0.05, 1.0)]
    assert chosen[0] == search.CHOICES[0]
    assert chosen[-1] == search.CHOICES[-1]
    places = [search.CHOICES.index(choice) for choice in chosen]
    assert places == sorted(places)
    assert len(set(places)) > 2
