"""Attention of the C++ steps behind long prefixes: positions are cut into ranges that threads may
share, and nothing but a token's own text changes its bits."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from support.small_engines import build_engine, random_prompt
from support.tiny_models import COMMON, SLIDING, STOP
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.bench.verify import verify
from medusa_kit.errors import ConfigError
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.cache_dtype import store_cache_as
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)
CPU = torch.device("cpu")
RANGE = 128  # attention.h's
SLOTS = 4 * RANGE
SHAPES = {  # (query heads, key/value heads, head size, window)
    "three heads": (6, 3, 16, None),
    "one head": (4, 1, 80, None),
    "as many heads": (3, 3, 32, None),
    "narrow window": (6, 3, 16, 7),
    "wide window": (4, 1, 16, RANGE + 40),
}
# Branches from a node to both sides of it, a long path among them.
BRANCHING = (-1, 0, 0, 1, 2, 2, 4, 0, 6, 8, 9, 3, 10, 12)
PATH = (0, 2, 4, 6, 8, 9, 10, 12, 13)


def verifier_of(shape: str, kind: type[Verifier] = NativeVerifier) -> Verifier:
    queries, keys, head_size, window = SHAPES[shape]
    arguments = {
        **COMMON, "num_attention_heads": queries, "num_key_value_heads": keys,
        "head_dim": head_size, "sliding_window": window, "max_position_embeddings": SLOTS,
        "hidden_size": 48, "eos_token_id": STOP,
    }  # fmt: skip
    family = "llama" if window is None else "gemma3_text"
    if window is not None:
        arguments |= {"layer_types": SLIDING, "query_pre_attn_scalar": 16}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **arguments)
    base = wrap_model(AutoModelForCausalLM.from_config(config).eval(), None, shape)
    return native_of(base) if kind is NativeVerifier else Verifier(base)


def native_of(base: BaseModel) -> NativeVerifier:
    return NativeVerifier(base, native_decoder(base))


def read(verifier: Verifier, text: Sequence[int]) -> TreeCache:
    cache = verifier.new_cache(1, SLOTS)
    if text:
        verifier.read_prompts(cache, [0], [text])
    return cache


def tree_logits(
    verifier: Verifier, cache: TreeCache, parents: Sequence[int], tokens: Sequence[int]
) -> Tensor:
    """logits_NV, not committed."""
    return verifier.score(cache, Forest.of([tokens], [parents], CPU), [0]).logits_NV


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [RANGE - 3, RANGE, 2 * RANGE + 50])
def test_a_tree_behind_a_long_prefix_is_the_models_own(shape, length, many_threads):
    own, model = verifier_of(shape), verifier_of(shape, Verifier)
    prompt, tokens = random_prompt(length, seed=3), random_prompt(len(BRANCHING), seed=4)
    expected = tree_logits(model, read(model, prompt), BRANCHING, tokens)
    actual = tree_logits(own, read(own, prompt), BRANCHING, tokens)
    assert torch.allclose(actual, expected, rtol=0, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [RANGE - 5, 2 * RANGE - 1])
def test_a_path_across_the_end_of_a_range_has_the_bits_of_its_text(shape, length, many_threads):
    own = verifier_of(shape)
    prompt, tokens = random_prompt(length, seed=5), random_prompt(len(BRANCHING), seed=6)
    among_others = tree_logits(own, read(own, prompt), BRANCHING, tokens)
    text = [tokens[node] for node in PATH]
    alone = tree_logits(own, read(own, prompt), range(-1, len(PATH) - 1), text)
    assert torch.equal(alone, among_others[list(PATH)])
    for place, node in enumerate(PATH):
        _, logits = own.read_prompts(own.new_cache(1, SLOTS), [0], [prompt + text[: place + 1]])
        assert torch.equal(logits[0], among_others[node])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_long_text_has_the_same_bits_in_any_pieces_and_threads(shape, many_threads):
    own, text = verifier_of(shape), random_prompt(2 * RANGE + 60, seed=7)
    ways = [(1, (0, 256)), (2, (0, 1, 100, 200, 300)), (5, (0, 127, 128, 129, 255, 257, 300))]
    kept = []
    for threads, ends in ways:
        torch.set_num_threads(threads)
        cache = own.new_cache(1, SLOTS)
        for start, end in itertools.pairwise((*ends, len(text))):
            last = own.read_prompts(cache, [0], [text[start:end]])[1]
        assert cache.block is not None
        kept.append((last, cache.block))
    for last, block in kept[1:]:
        assert torch.equal(last, kept[0][0])
        assert torch.equal(block, kept[0][1])


def test_a_row_has_the_same_bits_beside_longer_and_shorter_ones(many_threads):
    own = verifier_of("three heads")
    prompts = [random_prompt(length, seed=length) for length in (3, RANGE + 9, 2 * RANGE + 2)]
    together = own.new_cache(3, SLOTS)
    own.read_prompts(together, range(3), prompts)
    tokens = [random_prompt(len(BRANCHING), seed=8)] * 3
    nodes = Forest.of(tokens, [BRANCHING] * 3, CPU)
    scores = own.score(together, nodes, range(3)).logits_NV.split(len(BRANCHING))
    for prompt, expected in zip(prompts, scores, strict=True):
        alone = tree_logits(own, read(own, prompt), BRANCHING, tokens[0])
        assert torch.equal(alone, expected)


def in_half(shape: str) -> Verifier:
    verifier = verifier_of(shape)
    store_cache_as("float16", verifier)
    return verifier


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cache_in_float16_is_near_and_has_the_same_bits_in_any_tree(shape, many_threads):
    own, half = verifier_of(shape), in_half(shape)
    prompt, tokens = random_prompt(2 * RANGE - 4, seed=9), random_prompt(len(BRANCHING), seed=1)
    cache, exact_cache = read(half, prompt), read(own, prompt)
    logits = tree_logits(half, cache, BRANCHING, tokens)
    exact = tree_logits(own, exact_cache, BRANCHING, tokens)
    error = float((logits - exact).abs().max()) / float(exact.std())
    assert 0 < error < 0.02
    assert cache.block is not None
    assert cache.block.dtype == torch.float16
    assert 2 * cache.block.nbytes == exact_cache.block_of(0, 0).nbytes
    text = [tokens[node] for node in PATH]
    _, last = half.read_prompts(half.new_cache(1, SLOTS), [0], [prompt + text])
    assert torch.equal(last[0], logits[PATH[-1]])
    steps = read(half, prompt)
    for token, node in zip(text, PATH, strict=True):
        assert torch.equal(tree_logits(half, steps, (-1,), [token])[0], logits[node])
        steps.commit([[0]])


def test_numbers_are_rounded_as_torch_rounds_them(many_threads):
    """To the nearest, ties to even; keys and values of a layer that is given any numbers."""
    half, own = in_half("three heads"), verifier_of("three heads")
    prompt = random_prompt(90, seed=2)
    for verifier in (half, own):  # numbers of very different sizes, in the first layer's cache
        layer = verifier.base.model.model.layers[0].self_attn
        scale = 10.0 ** torch.linspace(-9, 6, layer.v_proj.out_features)[:, None]
        layer.v_proj.weight.data.mul_(scale)
    rounded, exact = (native_of(one.base) for one in (half, own))
    store_cache_as("float16", rounded)
    blocks = [read(one, prompt).block for one in (rounded, exact)]
    expected = blocks[1][0].clamp(-65504, 65504).half()
    assert torch.equal(blocks[0][0], expected)
    assert (expected.abs() == 65504).any()
    assert ((expected != 0) & (expected.abs() < 6e-5)).any()


def test_more_nodes_than_a_call_takes_go_through_torch_with_the_same_cache():
    half, own = in_half("one head"), verifier_of("one head")
    count = kernels.MAX_ROWS + 4
    parents, tokens = [-1, *[0] * (count - 1)], random_prompt(count, seed=3)
    prompt = random_prompt(20, seed=4)
    logits = tree_logits(half, read(half, prompt), parents, tokens)
    exact = tree_logits(own, read(own, prompt), parents, tokens)
    assert 0 < float((logits - exact).abs().max()) < 0.02 * float(exact.std())


def test_float16_is_refused_where_steps_do_not_run_in_cpp():
    with pytest.raises(ConfigError, match="cache float16 needs steps in C\\+\\+"):
        store_cache_as("float16", verifier_of("one head", Verifier))
    with pytest.raises(ConfigError, match="cache 'float8'"):
        build_engine(verifier_of("one head", Verifier).base, cache="float8")


def test_answers_with_a_cache_in_float16_are_called_lossy():
    engine = build_engine(verifier_of("three heads", Verifier).base, cache="float16")
    stats = engine.generate(random_prompt(9, seed=1), max_new_tokens=3).stats
    assert (stats.cache, stats.lossy, stats.lossy_by) == ("float16", True, ["float16 cache"])
    with pytest.raises(ConfigError, match="float16, which is lossy; there is nothing to verify"):
        verify(engine, None, [[5, 6]], max_new_tokens=2)
