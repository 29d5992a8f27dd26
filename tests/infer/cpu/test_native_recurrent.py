"""Heads that carry a state along the path: a pass goes on from its parent's."""

import pytest
import torch
from support.kernels.cpp_heads import base_of, inputs, own_layers, trained
from support.states import state_from
from support.tiny_models import COMMON, STOP
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import wrap_model
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.heads.scores import scored_guesses_after
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.heads import install_native_heads
from medusa_kit.infer.cpu.packed import int8_weights
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree

pytestmark = [
    pytest.mark.usefixtures("factors_in_24_bits"),
    pytest.mark.skipif(
        kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
    ),
]
BUSHY = CandidateTree.from_choices(
    [[0], [1], [4], [0, 0], [0, 3], [1, 0], [4, 0], [0, 3, 0], [1, 0, 0], [4, 0, 2], [4, 0, 3]]
)
WHOLE = CandidateTree.from_choices(
    [[i] for i in range(3)]
    + [[i, j] for i in range(3) for j in range(2)]
    + [[i, j, k] for i in range(3) for j in range(2) for k in range(2)]
)
GROWN = DynamicTree(24, (1.3, 0.8, 1.6), 6, 4)


def state_of(heads, rows):
    hidden, paths = inputs(heads.base, rows)
    return state_from([[1]] * rows, paths[:, 0].clamp_min(0).tolist(), hidden)


def with_kernels(heads):
    install_native_heads(heads, native_decoder(heads.base))
    assert heads.guesser is not None
    return heads


def drafted(heads, tree, state):
    """Tokens and parents of the tree in one call of the kernels, or of torch's own network."""
    draft = draft_with(heads, tree).propose(state)
    return draft.token_lists(), [shape.parents for shape in draft.shapes]


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_trees_are_those_of_torchs_own_network(num_blocks, many_threads):
    heads = trained(base_of("llama"), "recurrent", "reduced", num_blocks)
    for tree in (CandidateTree.chain(3), BUSHY, WHOLE, GROWN):
        for rows in (1, 5):
            state = state_of(heads, rows)
            heads.guesser = None
            expected = drafted(heads, tree, state)
            assert drafted(with_kernels(heads), tree, state) == expected


def test_nodes_of_a_depth_go_on_from_different_states():
    """Else the test above would hold with any one state for all of a row's nodes."""
    heads = trained(base_of("llama"), "recurrent", "reduced")
    state = state_of(heads, 5)
    trees = draft_with(heads, WHOLE).propose(state).token_lists()
    last = [[tuple(row[node : node + 2]) for node in range(10, 22, 2)] for row in trees]
    assert all(len(set(row)) > 2 for row in last)


@pytest.mark.parametrize("digits", [1, 3])
def test_scores_have_the_same_bits_alone_and_among_others(digits, monkeypatch, many_threads):
    monkeypatch.setattr(int8_weights, "DRAFT_DIGITS", digits)
    heads = with_kernels(trained(base_of("llama"), "recurrent", "shared"))
    given, paths = inputs(heads.base, 13)
    ids, scores = scored_guesses_after(heads, 2, given, paths, 5, 0.7)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (slice(0, 1), slice(4, 6), slice(12, 13), slice(0, 13)):
            own = scored_guesses_after(heads, 2, given[rows], paths[rows], 5, 0.7)
            assert torch.equal(own[0], ids[rows])
            assert torch.equal(own[1], scores[rows])


def test_factors_of_eight_bits_move_scores_a_little(monkeypatch):
    """Nowhere as far as another network would."""
    if not kernels.has_integers(kernels.load_library()):
        pytest.skip("no integers are multiplied here: factors stay float32")
    heads = trained(base_of("llama"), "recurrent", "shared")
    given, paths = inputs(heads.base, 13)
    exact = with_kernels(heads).guesser([2], given, paths, 1, [1.0])[1]
    monkeypatch.setattr(int8_weights, "DRAFT_DIGITS", 1)
    rounded = with_kernels(heads).guesser([2], given, paths, 1, [1.0])[1]
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, atol=0.2)


def test_several_heads_in_one_call():
    """Rows of each head take as many steps as it reads tokens."""
    heads = with_kernels(trained(base_of("llama"), "recurrent", "own"))
    hidden, paths = inputs(heads.base, 4)
    ids, scores = heads.quickly([0, 2], hidden, paths, 5, [0.7, 0.7])
    for place, k in enumerate((0, 2)):
        own_ids, own_scores = scored_guesses_after(heads, k, hidden, paths, 5, 0.7)
        assert torch.equal(ids[place], own_ids)
        assert torch.equal(scores[place], own_scores)


@pytest.mark.parametrize("mlp_size", [40, 64])
def test_widths_that_are_no_multiple_of_a_group_keep_their_numbers(mlp_size):
    config = AutoConfig.for_model(
        "llama", **{**COMMON, "hidden_size": 48, "head_dim": 16, "eos_token_id": STOP}
    )
    base = wrap_model(AutoModelForCausalLM.from_config(config).eval(), None, "odd")
    heads = trained(base, "recurrent", "own", mlp_size=mlp_size)
    hidden, paths = inputs(base, 5)
    ids, scores = scored_guesses_after(heads, 2, hidden, paths, 4, 0.7)
    own_ids, own_scores = scored_guesses_after(with_kernels(heads), 2, hidden, paths, 4, 0.7)
    assert torch.equal(own_ids, ids)
    assert torch.allclose(own_scores, scores, atol=2e-5)


def test_memory_is_counted_once_for_all_heads():
    heads = with_kernels(trained(base_of("llama"), "recurrent", "shared"))
    weights = sum(layer.weight.numel() for layer in own_layers(heads))
    assert weights < heads.guesser.num_bytes < 1.2 * weights
    assert heads.num_bytes > heads.guesser.num_bytes + 4 * weights
