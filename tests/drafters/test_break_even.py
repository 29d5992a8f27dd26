"""Heads that do not pay are not used for a while, and the text stays the same."""

from dataclasses import replace

import pytest
from support.small_engines import BUSHY, endless_base, engine_with_heads

from medusa_kit.drafters.heads.break_even import (
    LONGEST_WAIT,
    SHORTEST_WAIT,
    WINDOW,
    BreakEvenDrafter,
)
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.tree.plan import TreePlan, load_plan, save_plan

TOKENS = 100


@pytest.fixture(scope="module")
def engine():
    return engine_with_heads(endless_base(40))


def answer(engine, break_even):
    engine.use_tree(replace(TreePlan.of(BUSHY), break_even=break_even))
    return engine.generate([5, 6, 7], max_new_tokens=TOKENS)


def test_heads_that_never_pay_take_a_window_and_no_more(engine):
    plain = engine.generate([5, 6, 7], max_new_tokens=TOKENS, drafter="none")
    result = answer(engine, break_even=5.0)  # more than a tree of depth 3 can emit
    assert result.token_ids == plain.token_ids
    steps = result.stats.num_steps
    tried = WINDOW * (1 + (steps > WINDOW + SHORTEST_WAIT))
    assert result.stats.drafter == f"medusa, {steps - tried} of {steps} steps plain"
    assert steps - tried >= SHORTEST_WAIT


@pytest.mark.parametrize("break_even", [1.0, None])
def test_heads_that_pay_go_on(engine, break_even):
    assert answer(engine, break_even).stats.drafter == "medusa"


def test_the_wait_doubles_and_a_window_that_pays_ends_it():
    drafter = BreakEvenDrafter(PlainDrafter(endless_base(8).device), None, break_even=1.5)
    waits = []
    for emitted in (1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0):
        drafter._judge(emitted)
        waits.append(drafter._left)
        drafter._left = 0
    short = SHORTEST_WAIT
    assert waits == [short, 2 * short, 4 * short, 8 * short, LONGEST_WAIT, 0, short]
    assert 8 * short == LONGEST_WAIT


def test_the_break_even_comes_from_the_trees_own_search(tmp_path):
    path = tmp_path / "tree.json"
    save_plan(TreePlan.of(BUSHY), path, {"acceptance_length": 1.8, "predicted_speed_up": 1.2})
    assert load_plan(path).break_even == pytest.approx(1.5)
    save_plan(TreePlan.of(BUSHY), path, {})
    assert load_plan(path).break_even is None
