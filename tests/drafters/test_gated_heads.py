"""Drafters whose draft tokens are verified as far as they gain: the text is that of plain decoding,
whatever nodes and heads cost."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_engines import (
    BUSHY,
    build_engine,
    endless_base,
    engine_with_heads,
    random_heads,
    random_prompt,
)
from support.states import state_from

from medusa_kit.drafters import draft_with
from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.engine.engine import Engine
from medusa_kit.heads.guesser import Least
from medusa_kit.infer.decode.node_choice.cost import LearnedSteps, StepCost
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.drafters import SOURCES
from medusa_kit.tree.dynamic import DynamicTree

VOCAB, TOKENS, SCALES = 16, 100, (1.0, 1.0, 1.0)
FREE = {1: 1.0, 2: 1.0001, 64: 1.001}
EXPENSIVE = {1: 1.0, 2: 2.5, 64: 100.0}
KINDS = ["medusa", "hydra", "recurrent"]
TREES: dict[str, Any] = {"static": BUSHY, "grown": DynamicTree(8, SCALES, 6, 3)}


class Fixed(LearnedSteps):
    """These costs, whatever the clock says."""

    def __init__(self, measured: dict[int, float]) -> None:
        self.cost = StepCost(measured=measured)
        self.cost.record = lambda *_: None  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    engine = engine_with_heads(endless_base(VOCAB), kind=request.param)
    engine.draft_model = endless_base(VOCAB)
    return engine


def gated(engine: Engine, costs: dict[int, float], tree: str = "grown") -> Engine:
    own = replace(engine, scheduler=Scheduler(engine.verifier, steps=Fixed(costs)))
    own.use_tree(TREES[tree])
    return own


@pytest.mark.parametrize(
    ("tree", "rows", "temperature"),
    [("static", 1, 0.0), ("static", 3, 0.9), ("grown", 3, 0.0), ("grown", 1, 0.9)],
)
def test_the_text_is_that_of_plain_decoding(
    engine: Engine, tree: str, rows: int, temperature: float
) -> None:
    prompts = [random_prompt(5 + seed, seed, VOCAB) for seed in range(rows)]
    sampling: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 4}
    plain = engine.generate(prompts, drafter="none", **sampling)
    for costs in (FREE, {1: 1.0, 2: 1.3, 64: 20.0}, EXPENSIVE):
        own = gated(engine, costs, tree)
        for drafter in ("medusa", "auto"):
            found = own.generate(prompts, drafter=drafter, **sampling)
            assert [one.token_ids for one in found] == [one.token_ids for one in plain]


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "mtp"])
def test_each_source_is_verified_as_far_as_it_gains(engine: Engine, name: str) -> None:
    prompts = [random_prompt(6, seed, VOCAB) * 3 for seed in range(2)]
    plain = engine.generate(prompts, drafter="none", max_new_tokens=TOKENS)
    nodes = []
    for costs in (FREE, EXPENSIVE):
        found = gated(engine, costs).generate(prompts, drafter=name, max_new_tokens=TOKENS)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        nodes.append(found[0].stats.nodes_per_step)
    assert nodes[0] > 1.2
    assert nodes[1] < nodes[0]


@pytest.mark.parametrize("tree", TREES)
def test_where_nodes_are_expensive_steps_are_plain(engine: Engine, tree: str) -> None:
    prompts = [random_prompt(5 + 3 * seed, seed, VOCAB) for seed in range(3)]
    found = gated(engine, {1: 1.0, 2: 9.0, 64: 500.0}, tree).generate(
        prompts, max_new_tokens=TOKENS
    )
    assert all(one.stats.nodes_per_step < 1.1 for one in found)
    assert "none" in found[0].stats.drafter
    (why,) = [note for note in found[0].stats.drafter_notes if note.startswith("nodes")]
    assert "worth its cost from a chance of" in why or "no draft token is worth" in why


def test_the_whole_tree_is_proposed_where_nothing_is_chosen(engine: Engine) -> None:
    engine.use_tree(TREES["grown"])
    drafter = engine.drafter_for("medusa")
    assert isinstance(drafter, HeadsSource)
    state = state_from([[1], [2]], [5, 9], torch.randn(2, engine.base.info.hidden_size))
    whole = drafter.inner.propose(state)
    assert torch.equal(drafter.propose(state).tokens_BN, whole.tokens_BN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smoothing", [(), (1.0,)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_heads_that_compute_no_numbers_draft_nothing(
    kind: str, smoothing: tuple[float, ...], temperature: float
) -> None:
    heads = random_heads(endless_base(VOCAB), kind=kind)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.fill_(math.nan)
    engine = build_engine(heads.base, heads=heads)
    engine.use_tree(DynamicTree(8, SCALES, 6, 3, smoothing))
    own = replace(engine, scheduler=Scheduler(engine.verifier, steps=Fixed(FREE)))
    given: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "seed": 1}
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
    for row, trie in enumerate(source.guess(state)):
        assert trie.tokens == grown.tokens_BN[row].tolist()
        order = trie.by_chance()
        for node, chance in order[1:]:
            assert chance == pytest.approx(math.exp(grown.scores_BN[row, node]), rel=1e-4)
    source.set_min_chance(0.2, AcceptanceEstimate())
    few = inner.grow(state.hidden_BD, state.roots_B, Least(math.log(0.2), math.log(0.7)))
    for row, trie in enumerate(source.guess(state)):
        assert trie.num_nodes == sum(parent != -2 for parent in few.parents[row])


def test_a_probability_that_proves_wrong_is_corrected() -> None:
    heads = random_heads(endless_base(VOCAB), kind="recurrent")
    inner = draft_with(heads, DynamicTree(4, SCALES, 6, 3))
    state = state_from([[1]], [5], 3 * torch.randn(1, heads.config.hidden_size))
    (trie,) = HeadsSource(inner).guess(state)
    said, acceptance = trie.chances[1], AcceptanceEstimate()
    for _ in range(200):
        acceptance.record(trie.keys[1], True)
    assert acceptance.chance(trie.keys[1], said) > max(said, 0.9)
