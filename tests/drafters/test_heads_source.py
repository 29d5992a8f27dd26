"""Heads with a static tree among other sources: which of its nodes are named."""

import pytest
import torch
from support.small_engines import endless_base, random_heads
from support.states import state_from

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.drafters.heads.medusa import HeadsDrafter
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.infer.decode.drafter import State
from medusa_kit.tree.candidate_tree import CandidateTree

VOCAB = 16
TREE = CandidateTree(((0,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)))
SHARES = [0.5, 0.25, 0.3, 0.1, 0.05, 0.24]  # of steps that accepted each node
KINDS = ["medusa", "hydra", "recurrent"]


@pytest.fixture(params=KINDS)
def inner(request: pytest.FixtureRequest) -> HeadsDrafter:
    heads = random_heads(endless_base(VOCAB), kind=request.param)
    drafter = draft_with(heads, TREE)
    assert isinstance(drafter, HeadsDrafter)
    return drafter


def state_of(inner: HeadsDrafter) -> State:
    hidden_BD = 3 * torch.randn(2, inner.heads.config.hidden_size)
    return state_from([[1], [2]], [5, 9], hidden_BD)


def named(source: HeadsSource, state: State) -> list[int]:
    return [int(key[1]) for key in source.guess(state)[0].keys[1:] if isinstance(key, tuple)]


def test_every_node_with_its_share_of_its_parents_steps(inner: HeadsDrafter) -> None:
    state, source = state_of(inner), HeadsSource(inner, SHARES)
    for tree, tokens in zip(source.guess(state), inner.propose(state).token_lists(), strict=True):
        assert tree.tokens == tokens
        assert tree.parents == list(TREE.parents)
        assert tree.chances[1:] == pytest.approx([0.5, 0.25, 0.6, 0.2, 0.2, 0.8])


@pytest.mark.parametrize(
    ("least", "nodes"),
    [(0.0, [1, 2, 3, 4, 5, 6]), (0.2, [1, 2, 3, 6]), (0.26, [1, 3]), (0.4, [1]), (0.99, [1])],
)
def test_nodes_that_cannot_pay_are_not_named(
    inner: HeadsDrafter, least: float, nodes: list[int]
) -> None:
    state, source = state_of(inner), HeadsSource(inner, SHARES)
    source.set_min_chance(least, AcceptanceEstimate())
    assert named(source, state) == nodes
    whole = inner.propose(state).token_lists()
    for tree, tokens in zip(source.guess(state), whole, strict=True):
        assert tree.tokens == [tokens[0], *(tokens[node] for node in nodes)]


@pytest.mark.parametrize(("beside", "nodes"), [(0.26, [1, 3]), (0.45, [1]), (0.9, [1])])
def test_beside_the_likeliest_node_others_must_be_worth_another_node(
    inner: HeadsDrafter, beside: float, nodes: list[int]
) -> None:
    """The second node of a step may cost next to nothing, and the third much."""
    source = HeadsSource(inner, SHARES)
    source.set_min_chance(0.01, AcceptanceEstimate(), beside)
    assert named(source, state_of(inner)) == nodes


def test_a_static_tree_expects_what_was_calibrated_until_it_has_seen_more(
    inner: HeadsDrafter,
) -> None:
    source, acceptance = HeadsSource(inner, SHARES), AcceptanceEstimate()
    assert source.expected(acceptance) == pytest.approx(SHARES)
    for _ in range(90):
        acceptance.record(("medusa", 1), False)
    expected = source.expected(acceptance)
    assert expected is not None
    assert expected[0] == pytest.approx(0.05)
    assert HeadsSource(inner).expected(acceptance) is None


def test_what_was_right_so_far_decides(inner: HeadsDrafter) -> None:
    state, source, acceptance = state_of(inner), HeadsSource(inner, SHARES), AcceptanceEstimate()
    for _ in range(300):
        acceptance.record(("medusa", 3), False)
        acceptance.record(("medusa", 2), True)
    source.set_min_chance(0.2, acceptance)
    assert named(source, state) == [1, 2]  # and none below node 3


def test_deeper_heads_do_not_run_for_nodes_that_are_left_out(
    monkeypatch: pytest.MonkeyPatch, inner: HeadsDrafter
) -> None:
    state, source, asked = state_of(inner), HeadsSource(inner, SHARES), list[list[int]]()
    propose = inner.propose_nodes
    monkeypatch.setattr(
        inner,
        "propose_nodes",
        lambda state, nodes: asked.append(list(nodes)) or propose(state, nodes),
    )
    source.set_min_chance(0.4, AcceptanceEstimate())
    source.guess(state)
    assert asked == [[1]]
