"""Heads in one C++ call give the same guesses as through torch."""

from dataclasses import replace

import pytest
import torch
from support.kernels.cpp_heads import FAMILIES, base_of, inputs, own_layers, trained
from support.states import state_from
from support.tiny_models import COMMON, STOP
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import wrap_model
from medusa_kit.drafters.heads.hydra import HydraDrafter
from medusa_kit.heads.scores import scored_guesses, scored_guesses_after
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.heads import install_native_heads
from medusa_kit.tree.candidate_tree import CandidateTree

pytestmark = [
    pytest.mark.usefixtures("factors_in_24_bits"),
    pytest.mark.skipif(
        kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
    ),
]


def with_and_without(heads, call):
    """What `call()` gives by the kernels, and by torch."""
    heads.guesser = None
    install_native_heads(heads, native_decoder(heads.base))
    quick, heads.guesser = heads.guesser, None
    by_torch = call()
    used = []

    class Watched:
        def __call__(self, *arguments):
            used.append(quick(*arguments))
            return used[-1]

        def fill(self, *arguments):
            used.append(quick.fill(*arguments))
            return used[-1]

    heads.guesser = Watched()
    by_kernels = call()
    assert used
    assert all(guesses is not None for guesses in used)
    return by_kernels, by_torch


@pytest.mark.parametrize("projection", ["shared", "reduced", "own"])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_path(family, kind, projection, many_threads):
    heads = trained(base_of(family), kind, projection)
    for k, rows, count in ((0, 1, 1), (1, 2, 4), (2, 9, 10), (2, 64, 3)):
        hidden, paths = inputs(heads.base, rows)

        def ids(k=k, hidden=hidden, paths=paths, count=count):
            return heads.candidates_after(k, hidden, paths, count)

        def scored(k=k, hidden=hidden, paths=paths, count=count):
            return scored_guesses_after(heads, k, hidden, paths, count, 0.7)

        ours, theirs = with_and_without(heads, ids)
        assert torch.equal(ours, theirs)
        (ids_XC, scores_XC), (own_ids_XC, own_scores_XC) = with_and_without(heads, scored)
        assert torch.equal(ids_XC, own_ids_XC)
        assert torch.allclose(scores_XC, own_scores_XC, atol=2e-5)


@pytest.mark.parametrize("projection", ["shared", "reduced", "own"])
def test_all_heads_at_once(projection, many_threads):
    heads = trained(base_of("llama"), "medusa", projection)
    for rows, first in ((1, 3), (5, 2)):
        hidden, _ = inputs(heads.base, rows)

        def ids(hidden=hidden, first=first):
            return heads.candidates(hidden, 5, first)

        def scored(hidden=hidden, first=first):
            return scored_guesses(heads, hidden, 5, [0.5, 1.0, 1.5][:first])

        ours, theirs = with_and_without(heads, ids)
        assert ours.shape == (first, rows, 5)
        assert torch.equal(ours, theirs)
        (ids_KBC, scores_KBC), (own_ids_KBC, own_scores_KBC) = with_and_without(heads, scored)
        assert torch.equal(ids_KBC, own_ids_KBC)
        assert torch.allclose(scores_KBC, own_scores_KBC, atol=2e-5)


@pytest.mark.parametrize("kind", ["hydra", "recurrent"])
def test_a_whole_tree(kind, many_threads):
    """Leading shapes of two dimensions, and rows that share their hidden state."""
    heads = trained(base_of("llama"), kind, "reduced")
    tree = CandidateTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    drafter = HydraDrafter(heads, tree)
    hidden, paths = inputs(heads.base, 4)
    state = state_from([[1]] * 4, paths[:, 0].clamp_min(0).tolist(), hidden)
    ours, theirs = with_and_without(heads, lambda: drafter.propose(state).tokens_N)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("threads", [1, 3])
def test_equal_logits_go_by_token_id(threads, many_threads):
    """Equal rows of the projection give the same logit, in any thread."""
    heads = trained(base_of("llama"), "medusa", "own")
    torch.set_num_threads(threads)
    for projection in heads.projections:
        weight = projection.weight.data
        weight.copy_(weight[torch.arange(len(weight)) % 5])
    hidden, _ = inputs(heads.base, 3)
    ours, theirs = with_and_without(heads, lambda: heads.candidates(hidden, 8))
    assert torch.equal(ours, theirs)
    assert (ours.diff(dim=-1) == 5).any(), "no two of equal logits were among the best"


def test_a_row_has_the_same_bits_among_others(many_threads):
    heads = trained(base_of("llama"), "hydra", "shared")
    install_native_heads(heads, native_decoder(heads.base))
    hidden, paths = inputs(heads.base, 7)
    for k in range(2):
        _, together = scored_guesses_after(heads, k, hidden, paths, 4, 0.8)
        for row in range(7):
            own = slice(row, row + 1)
            _, alone = scored_guesses_after(heads, k, hidden[own], paths[own], 4, 0.8)
            assert torch.equal(alone[0], together[row])


def test_what_the_kernels_do_not_take():
    heads = trained(base_of("llama"), "hydra", "shared")
    install_native_heads(heads, native_decoder(heads.base))
    hidden, paths = inputs(heads.base, kernels.MAX_ROWS + 1)
    assert heads.quickly([1], hidden, paths, 2) is None
    assert heads.candidates_after(1, hidden, paths, 2).shape == (kernels.MAX_ROWS + 1, 2)
    training = trained(base_of("llama"), "hydra", "shared").requires_grad_(True)
    install_native_heads(training, native_decoder(training.base))
    assert training.guesser is None


def test_a_kind_that_the_kernels_do_not_know_stays_with_torch():
    """They would compute what they know of it: other draft tokens, and no error."""
    other = trained(base_of("llama"), "medusa", "shared")
    other.config = replace(other.config, kind="another")
    install_native_heads(other, native_decoder(other.base))
    assert other.guesser is None


@pytest.mark.parametrize("kind", ["hydra", "recurrent"])
@pytest.mark.parametrize("projection", ["reduced", "own"])
def test_own_weights_take_eight_bits(kind, projection):
    """So the guesses are those of rounded weights, not far from those of the weights themselves."""
    heads = trained(base_of("llama"), kind, projection)
    generator = torch.Generator().manual_seed(2)
    for layer in own_layers(heads):
        layer.weight.data.add_(0.01 * torch.randn(layer.weight.shape, generator=generator))
    hidden, paths = inputs(heads.base, 60)
    exact_ids, exact_XC = scored_guesses_after(heads, 1, hidden, paths, 3, 1.0)
    decoder = native_decoder(heads.base)
    install_native_heads(heads, decoder)
    ids, scores_XC = scored_guesses_after(heads, 1, hidden, paths, 3, 1.0)
    assert 0 < (scores_XC - exact_XC)[:, 0].abs().mean() < 0.05
    assert (ids[:, 0] == exact_ids[:, 0]).float().mean() > 0.85
    whole = sum(layer.weight.numel() for layer in own_layers(heads))
    if projection == "own":
        assert heads.guesser.num_bytes < 1.3 * whole


def test_widths_that_are_no_multiple_of_a_group_keep_their_numbers():
    config = AutoConfig.for_model(
        "llama", **{**COMMON, "hidden_size": 48, "head_dim": 16, "eos_token_id": STOP}
    )
    base = wrap_model(AutoModelForCausalLM.from_config(config).eval(), None, "odd")
    heads = trained(base, "medusa", "own")
    hidden, _ = inputs(base, 5)
    ours, theirs = with_and_without(heads, lambda: scored_guesses(heads, hidden, 4, [1.0, 0.7]))
    assert torch.equal(ours[0], theirs[0])
    assert torch.allclose(ours[1], theirs[1], atol=1e-6)
