"""Trees grown and filled in one C++ call are those of torch's code from the same guesses."""

import pytest
import torch
from support.kernels.cpp_heads import FAMILIES, NUM_HEADS, base_of, inputs, trained
from support.states import state_from

from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.drafters.heads.dynamic import ALL, DynamicDrafter
from medusa_kit.heads.guesser import MinLogProbs
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.heads import install_native_heads
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.drafter import State
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree

pytestmark = [
    pytest.mark.usefixtures("factors_in_24_bits"),
    pytest.mark.skipif(
        kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
    ),
]
KINDS = ["medusa", "hydra", "recurrent"]
SCALES = (1.3, 0.8, 1.6)
BUSHY = CandidateTree.from_choices([[0], [1], [4], [0, 0], [0, 3], [4, 0], [0, 0, 0], [4, 0, 2]])


@pytest.fixture(scope="module", params=KINDS)
def heads(request):
    heads = trained(base_of("llama"), request.param, "reduced")
    if heads.recurrent:
        heads.recurrent.gain.data.mul_(4.0)  # about as sure of their guesses as the other kinds
    return with_kernels(heads)


def with_kernels(heads):
    install_native_heads(heads, native_decoder(heads.base))
    return heads


def state_of(heads, rows, drawn=False, temperature=40.0):
    """`drawn`: every row but the second, each by its own settings."""
    hidden, paths = inputs(heads.base, rows)
    settings = [
        SamplingParams() if row == 1 else SamplingParams(temperature + row, top_p=0.9, seed=row)
        for row in range(rows if drawn else 0)
    ]
    samplers = [Sampler(heads.base, one, [1], 9) for one in settings]
    return state_from([[1]] * rows, paths[:, 0].clamp_min(0).tolist(), hidden, samplers)


def rows_of(draft):
    """tokens_BN of trees of one size."""
    return draft.tokens_N.view(len(draft.shapes), -1)


def grown(heads, tree, state, least=ALL):
    """Tokens and parents by the one C++ call, and by torch's code from guesses of the kernels."""
    drafter, draws = draft_with(heads, tree), state.draws()
    assert isinstance(drafter, DynamicDrafter)
    texts = drafter.texts(state)
    both = [
        grow(state.hidden_BD, state.roots_B, least, draws, texts)
        for grow in (drafter.grow, drafter._through_torch)
    ]
    close = 1e-5 if draws is None else 1e-3  # noise, and its rounding, count up to fifty times
    for (_, _, ours), (_, _, theirs) in zip(*both, strict=True):
        assert ours == pytest.approx(theirs, abs=close, rel=1e-5)
    return tuple(([tree[0] for tree in one], [tree[1] for tree in one]) for one in both)


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 7, 16, 40, 200])
def test_the_same_trees_as_torch_grows(heads, num_nodes, many_threads):
    for rows, ranks, beam in ((1, 8, 3), (5, 4, 1), (4, 3, 8), (2, 24, 30)):
        tree = DynamicTree(num_nodes, SCALES, ranks, beam)
        quick, by_torch = grown(heads, tree, state_of(heads, rows))
        assert quick == by_torch
        if rows > 2 and 4 <= num_nodes < 40:
            assert len({tuple(parents) for parents in quick[1]}) > 1


@pytest.mark.parametrize("num_nodes", [2, 4, 16, 40])
def test_the_same_trees_of_tokens_that_will_be_drawn(heads, num_nodes, many_threads):
    for rows, ranks, beam in ((1, 8, 3), (5, 4, 1), (4, 3, 8)):
        tree, state = DynamicTree(num_nodes, SCALES, ranks, beam), state_of(heads, rows, True)
        quick, by_torch = grown(heads, tree, state)
        assert quick == by_torch
        likeliest, _ = grown(heads, tree, state_of(heads, rows))
        same = [ours == theirs for ours, theirs in zip(quick[0], likeliest[0], strict=True)]
        assert same[1:2] in ([], [True])
        assert rows == 1 or not all(same)


def test_chances_of_tokens_that_will_be_drawn(heads):
    """At usual temperatures, where the tokens whose noise is not counted have some of the mass."""
    for ranks in (3, 12):
        tree = DynamicTree(16, SCALES, ranks)
        quick, by_torch = grown(heads, tree, state_of(heads, 4, True, 0.6))
        assert quick == by_torch


@pytest.mark.parametrize("asked", [-0.5, -1.5, -2.5])
def test_unlikely_paths_are_left_out_as_by_torch(heads, asked, many_threads):
    least, nodes = MinLogProbs(-2.5, asked), 40
    for rows in (1, 5):
        tree, state = DynamicTree(nodes, SCALES, 8, 3), state_of(heads, rows)
        quick, by_torch = grown(heads, tree, state, least)
        assert quick == by_torch
        whole, _ = grown(heads, tree, state)
        sizes = [len(row) for row in quick[1]]
        assert all(1 <= size < nodes for size in sizes)
        if asked == least.keep or heads.one_pass:  # then they are the first nodes of the whole
            for row, size in enumerate(sizes):
                assert quick[0][row][:size] == whole[0][row][:size]
                assert quick[1][row][:size] == whole[1][row][:size]


def repeating(heads, state, seed):
    """The same rows behind texts of which some repeat what the heads guess after the roots."""
    drawn = torch.Generator().manual_seed(seed)
    guessed = draft_with(heads, DynamicTree(6, SCALES, 3, 3)).propose(state).token_lists()
    tokens = []
    for row, own in enumerate(guessed):
        among = torch.tensor([*own, 2, 3])
        length = (0, 1, 40, 6000)[row % 4]
        tokens.append(among[torch.randint(len(among), (length,), generator=drawn)].tolist())
    return state_from(tokens, state.roots_B, state.hidden_BD, state.samplers)


@pytest.mark.parametrize("num_nodes", [2, 4, 16, 64])
@pytest.mark.parametrize("smoothing", [(3.0,), (15.0, 3.5, 4.5, 1.3), (0.01,) * 8])
def test_the_same_trees_beside_a_text(heads, num_nodes, smoothing, many_threads):
    # Among many nodes some paths are nearer to each other than the noise's rounding.
    kinds = (False, True) if num_nodes <= 40 else (False,)
    for rows, ranks, beam in ((1, 8, 3), (5, 4, 1), (4, 3, 8)):
        for drawn in kinds:
            state = repeating(heads, state_of(heads, rows, drawn), rows)
            tree = DynamicTree(num_nodes, SCALES, ranks, beam, smoothing)
            for least in (ALL, MinLogProbs(-2.5, -1.5)):
                quick, by_torch = grown(heads, tree, state, least)
                assert quick == by_torch
    if num_nodes == 2:
        return
    for drawn in kinds:
        state = repeating(heads, state_of(heads, 4, drawn), 4)
        alone, _ = grown(heads, DynamicTree(num_nodes, SCALES, 3, 8), state)
        tree = DynamicTree(num_nodes, SCALES, 3, 8, smoothing)
        assert grown(heads, tree, state)[0][0][2:] != alone[0][2:]  # rows with a text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_same_trees_whatever_the_default_dtype(heads, dtype):
    """What the kernels read by address has a dtype of its own."""
    state = repeating(heads, state_of(heads, 2), 2)
    tree = DynamicTree(16, SCALES, 4, 3, (15.0, 3.5))
    expected, _ = grown(heads, tree, state)
    path_XJ = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    ids, scores = heads.guesser([0], state.hidden_BD, path_XJ, 4, SCALES[:1])
    torch.set_default_dtype(dtype)
    try:
        assert grown(heads, tree, state)[0] == expected
        found = heads.guesser([0], state.hidden_BD, path_XJ, 4, SCALES[:1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], ids)
    assert torch.equal(found[1], scores)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("projection", ["shared", "own"])
@pytest.mark.parametrize("kind", ["hydra", "recurrent"])
def test_other_projections_and_families(family, projection, kind):
    heads = with_kernels(trained(base_of(family), kind, projection))
    for num_nodes in (4, 24):
        quick, by_torch = grown(heads, DynamicTree(num_nodes, SCALES, 6, 4), state_of(heads, 3))
        assert quick == by_torch


@pytest.mark.parametrize("kind", KINDS)
def test_equal_paths_keep_their_order(kind):
    """Equal logits inside a head, and children as probable as their parents."""
    heads = trained(base_of("llama"), kind, "own")
    for projection in heads.projections:
        weight = projection.weight.data
        weight.copy_(weight[torch.arange(len(weight)) % 5])
    heads = with_kernels(heads)
    state = state_of(heads, 4)
    for scales in (SCALES, (1e9,) * NUM_HEADS, (1e-4, 1.0, 1e-4)):
        for num_nodes in (3, 9, 30, 120):
            for beam in (2, 6):
                quick, by_torch = grown(heads, DynamicTree(num_nodes, scales, 7, beam), state)
                assert quick == by_torch


def test_one_certain_guess_makes_a_chain():
    """With one guess a head, each as probable as its parent, parents come first."""
    heads = with_kernels(trained(base_of("llama"), "hydra", "reduced"))
    (_, parents), by_torch = grown(heads, DynamicTree(6, (1e-6,) * 3, 1), state_of(heads, 2))
    assert parents == [[-1, 0, 1, 2]] * 2 == by_torch[1]


def test_a_row_grows_the_same_tree_among_others(heads, many_threads):
    drafter = draft_with(heads, DynamicTree(20, SCALES, 8, 4))
    state = state_of(heads, 7)
    together = drafter.grow(state.hidden_BD, state.roots_B)
    for row in range(7):
        own = State(state.requests[row : row + 1])
        assert drafter.grow(own.hidden_BD, own.roots_B) == [together[row]]


@pytest.mark.parametrize("tree", [CandidateTree.chain(1), CandidateTree.chain(3), BUSHY])
def test_a_given_tree_is_filled_as_by_torch(heads, tree, many_threads):
    drafter = draft_with(heads, tree)
    for rows in (1, 6):
        state = state_of(heads, rows)
        quick = rows_of(drafter.propose(state))
        expected = drafter.fill(state.hidden_BD, torch.tensor(state.roots_B))
        assert torch.equal(quick, expected)
        drawn, roots = state_of(heads, rows, True), torch.tensor(state.roots_B)
        quick = rows_of(drafter.propose(drawn))
        assert torch.equal(quick, drafter.fill(state.hidden_BD, roots, draws=drawn.draws()))
        assert not torch.equal(quick, expected)


def test_torch_grows_what_the_kernels_do_not_take(heads):
    state, tree = state_of(heads, kernels.MAX_ROWS + 1), DynamicTree(5, SCALES, 4, 2)
    drafter, filler = draft_with(heads, tree), draft_with(heads, CandidateTree.chain(2))
    size = tree.num_nodes, SCALES, 4, 2
    assert heads.guesser.grow(state.hidden_BD, state.roots_B, *size, ALL) is None
    for one in (drafter, filler):
        draft, alone = one.propose(state), one.propose(State(state.requests[9:10]))
        assert len(draft.shapes) == kernels.MAX_ROWS + 1
        assert draft.shapes[9] is alone.shapes[0]
        assert draft.token_lists()[9] == alone.token_lists()[0]


@pytest.mark.parametrize("nodes", [[], [1], [1, 2, 4], [1, 3, 6], list(range(1, 9))])
@pytest.mark.parametrize("through_torch", [False, True])
def test_some_nodes_of_a_tree_are_those_of_the_whole(heads, nodes, through_torch, monkeypatch):
    if through_torch:
        monkeypatch.setattr(heads, "guesser", None)
    state, drafter = state_of(heads, 3), draft_with(heads, BUSHY)
    whole, part = drafter.propose(state), drafter.propose_nodes(state, nodes)
    kept = [0, *nodes]
    assert torch.equal(rows_of(part), rows_of(whole)[:, kept])
    parents = [-1 if node == 0 else kept.index(BUSHY.parents[node]) for node in kept]
    assert all(list(shape.parents) == parents for shape in part.shapes)
