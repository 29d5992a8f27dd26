"""A prefix layer in C++ steps: the numbers of `PrefixLayer`, the bits of any batch, and the base's
own bits untouched."""

import pytest
import torch
from support.kernels.cpp_heads import base_of, inputs, trained
from support.small_engines import random_prompt
from support.tiny_models import model_of

from medusa_kit.base.model import wrap_model
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.prefix_layer import PrefixLayer, PrefixSizes
from medusa_kit.heads.scores import scored_guesses_after
from medusa_kit.infer.cpu import kernels
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.describe import Unsupported
from medusa_kit.infer.cpu.heads import install_native_heads
from medusa_kit.infer.cpu.int8_weights import GROUP, int8_blocks
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.packed.texts import calls_for, hidden_of_texts
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import Nodes

pytestmark = [
    pytest.mark.usefixtures("factors_in_24_bits"),
    pytest.mark.skipif(
        kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
    ),
]
SHAPES = {
    "llama": ("llama", {"num_key_value_heads": 3}),
    "one-key": ("llama", {"num_key_value_heads": 1, "intermediate_size": 64}),
    "odd": ("llama", {"hidden_size": 40, "num_attention_heads": 2, "intermediate_size": 50}),
    "windows": ("gemma3", {}),
}
TREES = [[(-1, 0, 0, 1, 2, 2, 4, 0), (-1, 0, 1, 1)], [(-1,), (-1, 0, 0, 2, 2)]]


def decoder_of(shape):
    name, changes = SHAPES[shape]
    base = wrap_model(model_of(name, **changes), None, shape)
    return base, native_decoder(base)


def trained_layer(base, rounded=True, **changes):
    """With weights as training leaves them; `rounded`: that the kernels hold exactly."""
    heads = MedusaHeads.for_base(base, 1, prefix_layers=1)
    layer = heads.prefix
    if changes:
        sizes = PrefixSizes(**{**layer.sizes.as_dict(), **changes})
        layer = PrefixLayer(base.info.hidden_size, sizes)
    generator = torch.Generator().manual_seed(3)
    for name, weight in layer.named_parameters():
        size = 0.3 if "norm" in name else 2 * weight.shape[-1] ** -0.5
        weight.data.add_(size * torch.randn(weight.shape, generator=generator))
        if weight.dim() == 2 and rounded:
            weight.data = as_held(weight.data)
    return layer.requires_grad_(False)


def as_held(weight):
    """Rounded as the kernels round it."""
    return int8_blocks(weight).expand() if weight.shape[1] % GROUP == 0 else weight


class Rows:
    """Texts in a cache, and what the decoder says of them."""

    def __init__(self, decoder, num_rows, slots=64, extra=1):
        self.decoder = decoder
        self.cache = TreeCache(decoder.packed.info["num_layers"] + extra, num_rows, slots)
        self.texts = [[] for _ in range(num_rows)]

    def read(self, rows, pieces, keep_last=True):
        nodes = Nodes.chains(pieces, torch.device("cpu"))
        ends = torch.tensor(nodes.counts).cumsum(0) - 1
        scores = self._score(nodes, rows, ends if keep_last else None)
        self.cache.commit([range(len(piece)) for piece in pieces], rows)
        for row, piece in zip(rows, pieces, strict=True):
            self.texts[row] += piece
        return scores

    def grow_trees(self, rows, parents, tokens):
        return self._score(trees(parents, tokens), rows, None)

    def commit(self, rows, parents, tokens, paths):
        self.cache.commit(paths, rows)
        for row, path, own in zip(rows, paths, tokens, strict=True):
            self.texts[row] += [own[node] for node in path]

    def _score(self, nodes, rows, keep):
        lengths = [self.cache.lengths[row] for row in rows]
        before = [n for n, count in zip(lengths, nodes.counts, strict=True) for _ in range(count)]
        positions = torch.tensor(before) + nodes.depths_N
        with torch.inference_mode():
            return self.decoder.score(self.cache, nodes, positions, rows, keep)


def trees(parents, tokens):
    """Nodes of one tree for each row, of different shapes."""
    depths, sees = [], []
    for own in parents:
        visible = torch.eye(len(own), dtype=torch.bool)
        for node, parent in enumerate(own):
            if parent >= 0:
                visible[node] |= visible[parent]
        depths.append(visible.sum(-1) - 1)
        sees.append(visible.flatten())
    flat = torch.tensor([token for own in tokens for token in own])
    return Nodes(flat, torch.cat(depths), torch.cat(sees), [len(own) for own in parents])


def expected_outputs(base, layer, text):
    """Of PrefixLayer at each token of a text, from hidden states of transformers' own forward."""
    with torch.inference_mode():
        hidden = base.hidden_states(torch.tensor([text]))
        return hidden[0], layer(hidden)[0]


def close(ours, theirs, tolerance=3e-5):
    return torch.allclose(ours, theirs, atol=tolerance * float(theirs.abs().max()), rtol=0)


def path_to(parents, node):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_the_layers_own(shape, many_threads):
    """Prompts in pieces, trees of different shapes, commits, and rows that are left out."""
    base, decoder = decoder_of(shape)
    layer = trained_layer(base)
    rows = Rows(decoder.with_prefix(layer), 3)
    for keep_last, sizes in ((True, (4, 9, 17)), (False, (3, 1, 12)), (True, (1, 1, 1))):
        pieces = [random_prompt(size, seed=size) for size in sizes]
        hidden = rows.read([0, 1, 2], pieces, keep_last)[0]
        texts = [expected_outputs(base, layer, text) for text in rows.texts]
        count = (lambda piece: 1) if keep_last else len
        for index in range(2):
            expected = torch.cat([
                text[index][-count(piece):] for text, piece in zip(texts, pieces, strict=True)
            ])  # fmt: skip
            assert close(hidden.chunk(2, dim=-1)[index], expected)
    for parents, used in ((TREES[0], [2, 0]), (TREES[1], [1, 2])):
        tokens = [random_prompt(len(own), seed=7) for own in parents]
        outputs = rows.grow_trees(used, parents, tokens)[0].chunk(2, dim=-1)[1]
        at = 0
        for row, own, its in zip(used, parents, tokens, strict=True):
            for node in range(len(own)):
                text = rows.texts[row] + [its[i] for i in path_to(own, node)]
                assert close(outputs[at], expected_outputs(base, layer, text)[1][-1])
                at += 1
        rows.commit(used, parents, tokens, [path_to(own, len(own) - 1) for own in parents])


@pytest.mark.parametrize("shape", ["llama", "windows"])
def test_the_bases_own_bits_stay(shape, many_threads):
    base, decoder = decoder_of(shape)
    with_layer = Rows(decoder.with_prefix(trained_layer(base)), 2)
    without = Rows(decoder, 2, extra=0)
    pieces, tokens = [random_prompt(9, 1), random_prompt(5, 2)], [[5, 6, 7, 8, 9, 3, 4, 5]] * 2
    steps = [lambda r: r.read([0, 1], pieces), lambda r: r.read([1], pieces[:1], False),
             lambda r: r.grow_trees([0, 1], [TREES[0][0]] * 2, tokens)]  # fmt: skip
    for step in steps:
        hidden, logits, ranked = step(with_layer)
        own_hidden, own_logits, own_ranked = step(without)
        assert torch.equal(hidden[:, : base.info.hidden_size], own_hidden)
        assert torch.equal(logits, own_logits)
        assert torch.equal(ranked, own_ranked)
    assert torch.equal(with_layer.cache.block[:-1], without.cache.block)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_outputs_have_the_same_bits_in_any_batch(threads, many_threads):
    """Also at the end of a prompt whatever its pieces, where other outputs are left out."""
    base, decoder = decoder_of("llama")
    decoder = decoder.with_prefix(trained_layer(base, rounded=False))
    prompts = [random_prompt(150, 1), random_prompt(13, 2), random_prompt(30, 3)]
    torch.set_num_threads(3)
    together = Rows(decoder, 3, 192)
    ends = together.read([0, 1, 2], prompts)[0]
    tokens = random_prompt(8, 4)
    trees_of_all = together.grow_trees([0, 1, 2], [TREES[0][0]] * 3, [tokens] * 3)[0].view(3, 8, -1)
    torch.set_num_threads(threads)
    for row, prompt in enumerate(prompts):
        alone = Rows(decoder, 1, 192)
        for start in range(0, len(prompt), 7):
            end = alone.read([0], [prompt[start : start + 7]], start % 2 == 0)[0][-1]
        assert torch.equal(end, ends[row])
        path = path_to(TREES[0][0], 6)
        chain = alone.read([0], [[tokens[node] for node in path]], False)[0]
        assert torch.equal(chain, trees_of_all[row][path])


def test_some_nodes_of_a_tree():
    """Any may be asked for, and in any number; also those that end rows which are no chains."""
    base, decoder = decoder_of("llama")
    rows = Rows(decoder.with_prefix(trained_layer(base)), 2)
    rows.read([0, 1], [random_prompt(5, 1), random_prompt(9, 2)])
    nodes = trees(TREES[0], [random_prompt(len(own), 3) for own in TREES[0]])
    every = rows._score(nodes, [0, 1], None)
    for keep in ([7, 11], [2], [0, 3, 9, 10]):
        some = rows._score(nodes, [0, 1], torch.tensor(keep))
        for ours, theirs in zip(some, every, strict=True):
            assert torch.equal(ours, theirs[keep])


def test_rounding_is_small():
    """Weights that eight bits do not hold."""
    base, decoder = decoder_of("llama")
    layer = trained_layer(base, rounded=False)
    rows, text = Rows(decoder.with_prefix(layer), 1), random_prompt(40, 5)
    ours = rows.read([0], [text], False)[0].chunk(2, dim=-1)[1]
    theirs = expected_outputs(base, layer, text)[1]
    error = float((ours - theirs).norm() / theirs.norm())
    assert 1e-5 < error < 0.05


def test_other_sizes(many_threads):
    """Query heads and MLP are the layer's own; keys and values must fit the cache."""
    base, decoder = decoder_of("llama")
    layer = trained_layer(base, query_heads=3, mlp=160)
    rows, text = Rows(decoder.with_prefix(layer), 1), random_prompt(20, 5)
    ours = rows.read([0], [text], False)[0].chunk(2, dim=-1)[1]
    assert close(ours, expected_outputs(base, layer, text)[1])
    for changes in ({"kv_heads": 6}, {"head_size": 32}):
        with pytest.raises(Unsupported, match="a prefix layer whose hidden size"):
            decoder.with_prefix(trained_layer(base, **changes))


def test_a_cache_without_the_layer_is_not_taken():
    base, decoder = decoder_of("llama")
    decoder = decoder.with_prefix(trained_layer(base))
    layers = base.info.num_layers
    assert not decoder.takes(TreeCache(layers, 1, 16), 4)
    assert decoder.takes(TreeCache(layers + 1, 1, 16), 4)


def test_hidden_states_alone_have_the_same_bits(many_threads):
    base, decoder = decoder_of("windows")
    nodes = Nodes.chains([random_prompt(9, 1), random_prompt(20, 2)], torch.device("cpu"))
    caches = [TreeCache(base.info.num_layers, 2, 32) for _ in range(2)]
    with torch.inference_mode():
        hidden, _, _ = decoder.score(caches[0], nodes, nodes.depths_N, [0, 1])
        alone = decoder.hidden_states(caches[1], nodes, nodes.depths_N, [0, 1])
    assert torch.equal(hidden, alone)
    assert torch.equal(caches[0].block, caches[1].block)


@pytest.mark.parametrize("kind", ["medusa", "rooted", "hydra", "recurrent"])
def test_heads_read_it_beside_the_hidden_state(kind, many_threads):
    heads = trained(base_of("llama"), kind, "reduced", prefix_layers=1)
    install_native_heads(heads, native_decoder(heads.base))
    quick = heads.guesser
    assert quick is not None
    for k, rows in ((0, 1), (2, 7)):
        given, paths = inputs(heads.base, rows, layers=2)
        heads.guesser = None
        ids, scores = scored_guesses_after(heads, k, given, paths, 5, 0.7)
        heads.guesser = quick
        own_ids, own_scores = scored_guesses_after(heads, k, given, paths, 5, 0.7)
        assert torch.equal(own_ids, ids)
        assert torch.allclose(own_scores, scores, atol=2e-5)
        without = torch.cat([given[:, :96], torch.zeros(rows, 96)], dim=-1)
        assert not torch.equal(scored_guesses_after(heads, k, without, paths, 5, 0.7)[1], scores)


def test_a_verifier_packs_a_frozen_layer_only():
    base, decoder = decoder_of("llama")
    verifier, layer = NativeVerifier(base, decoder), trained_layer(base)
    frozen = verifier.with_prefix(layer)
    assert frozen.native.prefix is not None
    assert frozen.native.packed is decoder.packed
    assert frozen.with_prefix(layer) is frozen
    assert frozen.with_prefix(None) is verifier
    assert verifier.native.prefix is None
    assert verifier.with_prefix(layer.requires_grad_(True)).native.prefix is None


def test_texts_share_calls():
    """Full calls, and rows of the cache that long texts share."""
    spans = [(0, 0, 300), (1, 0, 300), (2, 5, 9), (3, 0, 600), (4, 0, 0), (5, 7, 10)]
    calls = calls_for(spans)
    assert [sum(piece.length for piece in call) for call in calls] == [256] * 4 + [183]
    assert max(piece.place for call in calls for piece in call) == 2
    read = {}
    for call in calls:
        assert len({piece.place for piece in call}) == len(call)
        for place, before, row, start, end in call:
            own = read.setdefault(row, [place, spans[row][1]])
            assert own == [place, start]
            assert before == start - spans[row][1]
            own[1] = end
    assert {row: end for row, (_, end) in read.items()} == {0: 300, 1: 300, 2: 9, 3: 600, 5: 10}


def test_texts_of_a_call_have_their_own_bits(monkeypatch, many_threads):
    base, decoder = decoder_of("windows")
    ids = torch.tensor([random_prompt(40, seed) for seed in range(4)])
    spans = [(0, 0, 40), (1, 0, 3), (1, 3, 30), (2, 0, 1), (3, 0, 40)]
    together = hidden_of_texts(decoder, ids, spans, 128)
    monkeypatch.setattr(kernels, "MAX_ROWS", 17)
    assert torch.equal(hidden_of_texts(decoder, ids, spans, 128), together)
    for row, start, end in spans:
        with torch.inference_mode():
            expected = base.hidden_states(ids[row : row + 1, start:end])[0]
        assert close(together[row, start:end], expected)
    assert not together[1, 30:].any()
    assert not together[2, 1:].any()
