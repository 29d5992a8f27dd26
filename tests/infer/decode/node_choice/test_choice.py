"""The guesses that a step verifies are those with the most tokens a second over all its rows."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_kit.infer.decode.node_choice.choice import choose_nodes
from medusa_kit.infer.decode.node_choice.cost import StepCost

SURE, LIKELY, POOR = 0.95, 0.6, 0.15
# As SmolLM2 on two cores: a second node is nearly free, from four on each costs a quarter step.
CPU = StepCost(measured={1: 7.4, 2: 8.3, 4: 10.7, 8: 18.2, 16: 33.0, 32: 65.0})


def counts_for(rows: int, chances: list[float]) -> list[int]:
    return choose_nodes([chances] * rows, 0, CPU).counts


def test_alone_a_likely_guess_pays_and_beside_many_rows_none_does() -> None:
    assert counts_for(1, [LIKELY, POOR]) == [1]
    assert counts_for(16, [LIKELY, POOR]) == [0] * 16
    assert sum(counts_for(2, [LIKELY, POOR])) == 2


def test_of_several_rows_the_surest_guesses_are_taken() -> None:
    chances = [[LIKELY], [SURE, SURE], [POOR], [SURE]]
    assert choose_nodes(chances, 0, CPU).counts == [0, 2, 0, 1]


def test_other_nodes_of_the_step_make_guesses_dearer() -> None:
    assert choose_nodes([[LIKELY]], 0, CPU).counts == [1]
    assert choose_nodes([[LIKELY]], 15, CPU).counts == [0]


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
    choice = choose_nodes(chances, others, cost)
    roots = others + len(chances)

    def rate(counts: tuple[int, ...]) -> float:
        kept = sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
        return (roots + kept) / cost.seconds(roots + sum(counts))

    best = max(rate(counts) for counts in product(*(range(len(row) + 1) for row in chances)))
    # Guesses with a chance under a hundredth are left out, whatever they would add.
    found = choice.tokens / choice.seconds
    assert rate(tuple(choice.counts)) == pytest.approx(found)
    assert found >= best - 0.01 * sum(map(len, chances)) / cost.seconds(roots) - 1e-9
