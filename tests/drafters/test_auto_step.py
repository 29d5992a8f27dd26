"""What a step of `auto` gains by asking heads, and which sources it has."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from support.states import begun, state_from

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.mixed.auto import AutoDrafter
from medusa_kit.drafters.mixed.chooser import SHORTEST_WAIT, Chooser
from medusa_kit.drafters.mixed.combined import usual_sources
from medusa_kit.drafters.mixed.experience import Experience
from medusa_kit.drafters.mixed.step import Step
from medusa_kit.drafters.trie import Trie
from medusa_kit.infer.node_choice.cost import StepCost
from medusa_kit.tree.dynamic import DynamicTree


def test_a_gain_is_what_asking_adds_to_the_same_step() -> None:
    """0.805 tokens more, for a second more at a rate of two tokens in 1.6 seconds."""
    cost = StepCost(measured={1: 1.0, 32: 1.0 + 31 * 0.5})
    free, heads = Trie(1), Trie(1)
    free.add(0, 2, 0.9)
    free.add(1, 3, 0.2)
    heads.add(0, 2, 0.95)
    heads.add(1, 4, 0.9)
    step = Step([free], cost, 0, start=0.0)
    step.promise(2.0, num_nodes=2, between=0.1)
    step.merge([heads])
    step.keep([2])
    step.asking = 0.5
    assert step.tries[0].tokens == [1, 2, 4]
    assert step.expected == pytest.approx(0.95 + 0.95 * 0.9)
    assert step.gained_by_asking() == pytest.approx(2.805 - 2.0 - 1.0 * 2.0 / 1.6)


def test_what_lies_between_steps_counts_twice_its_usual_time_at_most() -> None:
    chooser = Chooser([0.0, 0.5])
    assert chooser.between(0.0) == 0.0
    assert chooser.between(0.1) == pytest.approx(0.1)
    assert chooser.between(100.0) == pytest.approx(0.105)
    assert chooser.between(0.0) == pytest.approx(0.105)


def test_recycling_is_left_out_beside_heads_that_see_the_text() -> None:
    def names(tree: object, heads: object) -> list[str]:
        refused: object = None
        context = SimpleNamespace(heads=heads, tree=tree, heads_refused=refused, draft_model=None)
        context.base = SimpleNamespace(info=SimpleNamespace(name="tiny"), config=SimpleNamespace())
        return usual_sources(cast(DraftContext, context), None)[0]

    blind = DynamicTree(4, (1.0, 1.0))
    assert names(None, None) == ["suffix", "recycling"]
    assert names(blind, object()) == ["suffix", "recycling", "medusa"]
    assert names(replace(blind, doubts=(1.0,)), object()) == ["suffix", "medusa"]


def test_a_row_that_joins_brings_another_text() -> None:
    chooser = Chooser([0.0, 0.5])
    experience = Experience(AcceptanceEstimate(), StepCost(0.1), [0.0], _choosers={1: chooser})
    for _ in range(1000):
        situation, choice = chooser.choose(1.0)
        chooser.record(situation, choice, -0.02)
    drafter = AutoDrafter([], [], experience, torch.device("cpu"), 4)
    begun(drafter, state_from([[1]], [2]))
    for _ in range(SHORTEST_WAIT + 1):
        situation, choice = chooser.choose(1.0)
        if choice:
            return
        chooser.record(situation, choice)
    raise AssertionError("not tried soon")
