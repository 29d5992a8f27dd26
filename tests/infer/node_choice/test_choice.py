"""The guesses that a step verifies are those with the most tokens a second over all its rows."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_kit.infer.node_choice.choice import Offer, choose_nodes
from medusa_kit.infer.node_choice.cost import StepCost

SURE, LIKELY, POOR = 0.95, 0.6, 0.15
# As SmolLM2 on two cores: a second node is nearly free, from four on each costs a quarter step.
CPU = StepCost(measured={1: 7.4, 2: 8.3, 4: 10.7, 8: 18.2, 16: 33.0, 32: 65.0})


def counts_for(rows: int, chances: list[float]) -> list[int]:
    return choose_nodes([Offer([chances] * rows)], 0, CPU).counts[0]


def test_alone_a_likely_guess_pays_and_beside_many_rows_none_does() -> None:
    assert counts_for(1, [LIKELY, POOR]) == [1]
    assert counts_for(16, [LIKELY, POOR]) == [0] * 16
    assert sum(counts_for(2, [LIKELY, POOR])) == 2


def test_of_several_rows_the_surest_guesses_are_taken() -> None:
    chances = [[LIKELY], [SURE, SURE], [POOR], [SURE]]
    assert choose_nodes([Offer(chances)], 0, CPU).counts == [[0, 2, 0, 1]]


def test_other_nodes_of_the_step_make_guesses_dearer() -> None:
    assert choose_nodes([Offer([[LIKELY]])], 0, CPU).counts == [[1]]
    assert choose_nodes([Offer([[LIKELY]])], 15, CPU).counts == [[0]]


def test_an_offer_that_takes_time_must_pay_for_it_too() -> None:
    quick, slow = Offer([[LIKELY]], seconds=0.5), Offer([[LIKELY]], seconds=6.0)
    assert choose_nodes([quick], 0, CPU).counts == [[1]]
    assert choose_nodes([slow], 0, CPU).counts == [[0]]
    assert choose_nodes([slow, Offer([[LIKELY]])], 0, CPU).counts == [[0], [1]]


def test_a_trial_is_made_where_nothing_pays() -> None:
    assert choose_nodes([Offer([[POOR]] * 8, trial=3)], 0, CPU).counts == [[0, 0, 0, 1, 0, 0, 0, 0]]


rows_of_chances = st.lists(
    st.lists(st.floats(0.0, 1.0), max_size=3).map(lambda row: sorted(row, reverse=True)),
    min_size=1, max_size=4,
)  # fmt: skip


@given(rows_of_chances, st.integers(0, 6), st.lists(st.floats(0.01, 3.0), min_size=5, max_size=5))
def test_no_other_choice_gives_more_tokens_a_second(
    chances: list[list[float]], others: int, growth: list[float]
) -> None:
    times, total = {}, 1.0
    for size, more in zip((1, 2, 4, 8, 16), growth, strict=True):
        total += more
        times[size] = total
    cost = StepCost(measured=times)
    choice = choose_nodes([Offer(chances)], others, cost)
    roots = others + len(chances)

    def rate(counts: tuple[int, ...]) -> float:
        kept = sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
        return (roots + kept) / cost.seconds(roots + sum(counts))

    best = max(rate(counts) for counts in product(*(range(len(row) + 1) for row in chances)))
    # Guesses with a chance under a hundredth are left out, whatever they would add.
    assert rate(tuple(choice.counts[0])) == pytest.approx(choice.rate)
    assert choice.rate >= best - 0.01 * sum(map(len, chances)) / cost.seconds(roots) - 1e-9


def test_naming_deeper_guesses_must_pay_too() -> None:
    """The second guess costs more than it brings; of two rows, the deeper one counts, once."""
    dear, free = [0.0, 5.0], [0.0, 0.0]
    chances = [LIKELY, LIKELY]
    assert choose_nodes([Offer([chances], 0.1, more=dear)], 0, CPU).counts == [[1]]
    assert choose_nodes([Offer([chances], 0.1, more=free)], 0, CPU).counts == [[2]]
    both = choose_nodes([Offer([chances] * 2, 0.1, more=[0.0, 0.2])], 0, CPU)
    assert both.counts == [[2, 2]]
    assert both.seconds == pytest.approx(CPU.up_to(6)[6] + 0.3)
