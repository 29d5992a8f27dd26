"""Drafters whose draft tokens are verified as far as they gain: the text is that of plain decoding,
whatever nodes and heads cost."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.samples import Case, covering, pairs
from support.small_engines import (
    BUSHY,
    build_engine,
    endless_base,
    engine_with_heads,
    random_heads,
    random_prompt,
)
from support.states import state_from

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.engine.engine import Engine
from medusa_kit.heads.guesser import MinLogProbs
from medusa_kit.infer.decode.node_choice.cost import LearnedSteps, StepCost
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.drafters import SOURCES
from medusa_kit.tree.dynamic import DynamicTree

VOCAB, TOKENS, SCALES = 16, 100, (1.0, 1.0, 1.0)
COSTS = {
    "free": {1: 1.0, 2: 1.0001, 64: 1.001},
    "between": {1: 1.0, 2: 1.3, 64: 20.0},
    "expensive": {1: 1.0, 2: 2.5, 64: 100.0},
}
OTHER = ("medusa", "mtp")  # heads, which are here of each kind, and what this base has not
KINDS = ["medusa", "hydra", "recurrent"]
TREES: dict[str, Any] = {"static": BUSHY, "grown": DynamicTree(8, SCALES, 6, 3)}


class Fixed(LearnedSteps):
    """These costs, whatever the clock says."""

    def __init__(self, measured: dict[int, float]) -> None:
        self.cost = StepCost(measured=measured)
        self.cost.record = lambda *_: None  # type: ignore[method-assign]


@cache
def engine_of(kind: str) -> Engine:
    engine = engine_with_heads(endless_base(VOCAB), kind=kind)
    engine.draft_model = endless_base(VOCAB)
    return engine


def gated(engine: Engine, costs: dict[int, float], tree: str = "grown") -> Engine:
    own = replace(engine, scheduler=Scheduler(engine.verifier, steps=Fixed(costs)))
    own.use_tree(TREES[tree])
    return own


def named(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


# Each two of these meet in one case at least.
WAYS = {
    "kind": KINDS, "tree": list(TREES), "rows": [1, 3], "temperature": [0.0, 0.9],
    "costs": list(COSTS),
}  # fmt: skip


@pytest.mark.parametrize("case", covering(WAYS, lambda _: True), ids=named)
def test_the_text_is_that_of_plain_decoding(case: Case) -> None:
    engine = engine_of(case["kind"])
    prompts = [random_prompt(5 + seed, seed, VOCAB) for seed in range(case["rows"])]
    sampling: dict[str, Any] = {
        "max_new_tokens": 40, "temperature": case["temperature"], "seed": 4,
    }  # fmt: skip
    plain = engine.generate(prompts, drafter="none", **sampling)
    own = gated(engine, COSTS[case["costs"]], case["tree"])
    for drafter in ("medusa", "auto"):
        found = own.generate(prompts, drafter=drafter, **sampling)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]


# What sources do but heads does not depend on what is in an engine beside them.
NAMED = [*pairs(KINDS, ["medusa"]), *(("medusa", name) for name in SOURCES if name not in OTHER)]


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_each_source_is_verified_as_far_as_it_gains(kind: str, name: str) -> None:
    engine, nodes = engine_of(kind), []
    prompts = [random_prompt(6, seed, VOCAB) * 3 for seed in range(2)]
    plain = engine.generate(prompts, drafter="none", max_new_tokens=TOKENS)
    for costs in ("free", "expensive"):
        found = gated(engine, COSTS[costs]).generate(prompts, drafter=name, max_new_tokens=TOKENS)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        nodes.append(found[0].stats.nodes_per_step)
    assert nodes[0] > 1.2
    assert nodes[1] < nodes[0]


@pytest.mark.parametrize(("kind", "tree"), pairs(KINDS, list(TREES)))
def test_where_nodes_are_expensive_steps_are_plain(kind: str, tree: str) -> None:
    prompts = [random_prompt(5 + 3 * seed, seed, VOCAB) for seed in range(3)]
    found = gated(engine_of(kind), {1: 1.0, 2: 9.0, 64: 500.0}, tree).generate(
        prompts, max_new_tokens=TOKENS
    )
    assert all(one.stats.nodes_per_step < 1.1 for one in found)
    assert "none" in found[0].stats.drafter
    (why,) = [note for note in found[0].stats.drafter_notes if note.startswith("nodes")]
    assert "draft token is worth its cost" in why


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_tree_is_proposed_where_nothing_is_chosen(kind: str) -> None:
    engine = engine_of(kind)
    engine.use_tree(TREES["grown"])
    drafter = engine.drafter_for("medusa")
    assert isinstance(drafter, HeadsSource)
    state = state_from([[1], [2]], [5, 9], torch.randn(2, engine.base.info.hidden_size))
    whole = drafter.inner.propose(state)
    assert torch.equal(drafter.propose(state).tokens_N, whole.tokens_N)


NUMBERLESS = {"kind": KINDS, "smoothing": [(), (1.0,)], "temperature": [0.0, 0.9]}


@pytest.mark.parametrize("case", covering(NUMBERLESS, lambda _: True), ids=named)
def test_heads_that_compute_no_numbers_draft_nothing(case: Case) -> None:
    heads = random_heads(endless_base(VOCAB), kind=case["kind"])
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.fill_(math.nan)
    engine = build_engine(heads.base, heads=heads)
    engine.use_tree(DynamicTree(8, SCALES, 6, 3, case["smoothing"]))
    own = replace(engine, scheduler=Scheduler(engine.verifier, steps=Fixed(COSTS["free"])))
    given: dict[str, Any] = {"max_new_tokens": 20, "temperature": case["temperature"], "seed": 1}
    plain = own.generate(random_prompt(9, 1, VOCAB), drafter="none", **given)
    for drafter in ("medusa", "auto"):
        found = own.generate(random_prompt(9, 1, VOCAB), drafter=drafter, **given)
        assert found.token_ids == plain.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_chances_are_those_that_the_heads_give(kind: str) -> None:
    heads = random_heads(endless_base(VOCAB), kind=kind)
    inner = draft_with(heads, DynamicTree(12, SCALES, 6, 3))
    assert isinstance(inner, DynamicDrafter)
    state = state_from([[1], [2]], [5, 9], 3 * torch.randn(2, heads.config.hidden_size))
    grown, source = inner.grow(state.hidden_BD, state.roots_B), HeadsSource(inner)
    for row, tree in enumerate(source.guess(state)):
        tokens, _, scores = grown[row]
        assert tree.tokens == tokens
        order = tree.by_chance()
        for node, chance in order[1:]:
            assert chance == pytest.approx(math.exp(scores[node]), rel=1e-4)
    source.set_min_chance(0.2, AcceptanceEstimate())
    few = inner.grow(state.hidden_BD, state.roots_B, MinLogProbs(math.log(0.2), math.log(0.7)))
    for row, tree in enumerate(source.guess(state)):
        assert tree.num_nodes == len(few[row][0])


def test_a_probability_that_proves_wrong_is_corrected() -> None:
    heads = random_heads(endless_base(VOCAB), kind="recurrent")
    inner = draft_with(heads, DynamicTree(4, SCALES, 6, 3))
    state = state_from([[1]], [5], 3 * torch.randn(1, heads.config.hidden_size))
    (tree,) = HeadsSource(inner).guess(state)
    said, acceptance = tree.chances[1], AcceptanceEstimate()
    for _ in range(200):
        acceptance.record(tree.keys[1], True)
    assert acceptance.chance(tree.keys[1], said) > max(said, 0.9)
