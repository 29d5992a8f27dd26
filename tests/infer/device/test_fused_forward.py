"""The fused forward against plain transformers, and against itself on other ways to the same token.

On a GPU where there is one, else by Triton's interpreter, which has no bfloat16 products: float32.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.attention_inputs import needs_triton
from support.fused import (
    fused_base,
    fused_model,
    fused_verifier,
    one_by_one,
    plain_logits,
    random_tokens,
    read_by_torch,
    trees_of,
)
from torch.nn import functional as F

from medusa_kit.base.model import wrap_model
from medusa_kit.infer.device import fused_forward, fused_tiles
from medusa_kit.infer.device.fused_model import EXACT, FAST, FusedModel
from medusa_kit.infer.device.fused_step import ancestors_in_place
from medusa_kit.infer.device.guard import NoHostReads
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.outputs import TextStates
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.tree.shape import chain, path_to, shape_of

pytestmark = needs_triton
PARENTS = ((-1, 0, 0, 1, 2, 2, 4), (-1, 0, 1))
MODELS = ["llama-with-biases", "llama-3-rotary", "mistral-sliding", "qwen2", "qwen3",
          "gemma3", "gemma3-capped"]  # fmt: skip
# Two modes for the families that promises are made of, one for each way in which they differ.
CASES = [(name, EXACT if place % 2 else FAST) for place, name in enumerate(MODELS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_logits_are_those_of_plain_transformers(name: str, mode: str) -> None:
    """A prompt read by it, then trees of two requests after prefixes of different length: one in
    which splits, tail and window all take part."""
    reference, base = fused_model(name), fused_base(name)
    verifier = fused_verifier(base, mode)
    cache = verifier.new_cache(3, 200)
    prompts = [random_tokens(150, 7), random_tokens(6, 8)]
    read_by_torch(verifier, cache, [2], prompts[:1])
    read = verifier.score(cache, trees_of([chain(6).parents], base.device), [0])
    cache.forget(0)
    text = trees_of([chain(6).parents], base.device).token_lists()[0]
    expected = reference(torch.tensor([text], device=base.device)).logits[0]
    close(read.logits_NV, expected)
    read_by_torch(verifier, cache, [0], prompts[1:])
    trees = trees_of(PARENTS, base.device)
    scores = verifier.score(cache, trees, [2, 0])
    close(scores.logits_NV, plain_logits(reference, prompts, trees, PARENTS))
    close(base.head_logits(scores.hidden_ND), scores.logits_NV)
    assert verifier.num_captured == 2
    assert verifier.num_loose == 0


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5 of the spread of logits."""
    assert float((actual - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def bits_differ(verifier: CapturedVerifier, length: int) -> bool:
    """Whether the deepest path of a tree gets other bits than the same tokens read one by one, in
    another slot of a cache of another size, without the other request."""
    cache, alone = verifier.new_cache(2, 250), verifier.new_cache(3, 300)
    prompts = [random_tokens(length, 7), random_tokens(9, 8)]
    read_by_torch(verifier, cache, [0, 1], prompts)
    read_by_torch(verifier, alone, [0], prompts[1:])
    alone.take_row(2, cache, 0, length)
    trees = trees_of(PARENTS, verifier.base.device)
    in_tree_NV = verifier.score(cache, trees, [0, 1]).logits_NV
    path = path_to(len(PARENTS[0]) - 1, PARENTS[0])
    tokens = trees.token_lists()[0]
    as_text_TV = one_by_one(verifier, alone, 2, [tokens[node] for node in path])
    return not torch.equal(in_tree_NV[path], as_text_TV)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("llama", 61), ("mistral-sliding", 174)])
def test_a_draft_token_gets_the_bits_that_it_gets_as_text(name: str, length: int) -> None:
    """Where a tail begins further on below the root, and where splits are merged."""
    assert not bits_differ(fused_verifier(fused_base(name)), length)


@pytest.mark.slow
def test_a_prompt_has_the_same_bits_however_it_is_read() -> None:
    """At once, in pieces, token by token, alone or beside another; what a draft token leaves in the
    KV cache included."""
    verifier = fused_verifier(fused_base("qwen3"))
    prompt, other = random_tokens(11, 7), random_tokens(5, 8)
    cache, pieces = verifier.new_cache(2, 64), verifier.new_cache(1, 300)
    seen: dict[int, TextStates] = {}
    hidden_BD, logits_BV = verifier.read_prompts(cache, [1, 0], [prompt, other], seen)
    verifier.read_prompts(pieces, [0], [prompt[:4]])
    last_V = one_by_one(verifier, pieces, 0, prompt[4:])[-1]
    assert torch.equal(logits_BV[0], last_V)
    assert cache.lengths == [5, 11]
    assert cache.block is not None
    assert pieces.block is not None
    assert torch.equal(cache.block[:, :, 1, :, :11], pieces.block[:, :, 0, :, :11])
    assert seen[1].hidden is not None
    assert seen[0].hidden is not None
    assert torch.equal(seen[1].hidden[-1], hidden_BD[0])
    assert len(seen[0].hidden) == 5


@pytest.mark.slow
def test_a_prompt_whose_reading_failed_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = fused_verifier(fused_base("llama"))
    cache, score, calls = verifier.new_cache(2, 64), CapturedVerifier.score, list[int]()

    def fails(self: CapturedVerifier, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return score(self, *arguments)

    monkeypatch.setattr(CapturedVerifier, "score", fails)
    with pytest.raises(torch.OutOfMemoryError):
        verifier.read_prompts(cache, [0, 1], [[3, 4], [5, 6]])
    assert cache.lengths == [0, 0]
    verifier.read_prompts(cache, [0, 1], [[3, 4], [5, 6]])
    assert cache.lengths == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["product", "attention"])
def test_sums_that_depend_on_company_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees products whose sums go by the number of nodes, and attention whose sums
    go by the slots that the nodes are in."""

    def by_number_of_nodes(self: Any, matrix: Any, inputs_TK: torch.Tensor) -> torch.Tensor:
        pieces = range(1 + len(inputs_TK) % 7)
        step = len(pieces)
        parts = [F.linear(inputs_TK[:, k::step], matrix.weight_NK[:, k::step]) for k in pieces]
        return torch.stack(parts).sum(0)

    verifier = fused_verifier(fused_base("llama"))
    if fault == "product":
        monkeypatch.setattr(fused_forward.FusedForward, "_product", by_number_of_nodes)
    else:
        monkeypatch.setattr(fused_forward.FusedForward, "_attend", attended_by_slots)
    assert bits_differ(verifier, 61)


def attended_by_slots(
    self: Any, layer: Any, queries: Any, keys_BGSE: Any, values_BGSE: Any, nodes: Any, _: Any
) -> torch.Tensor:
    """Attention by torch over each row's slots, those of hidden nodes included."""
    parts, found = self.model.parts, list[torch.Tensor]()
    for number, row in enumerate(nodes.rows_T.tolist()):
        length, first = int(nodes.lengths_B[row]), int(nodes.firsts_B[row])
        count = int(nodes.counts_B[row])
        sees = (nodes.words_TW[number, 0] >> torch.arange(count)) & 1 == 1
        mask = torch.cat([torch.ones(length, dtype=torch.bool), sees])
        assert first <= len(queries)
        query = queries[number].view(parts.query_heads, 1, parts.head_size)
        keys, values = (slots[row, :, : length + count] for slots in (keys_BGSE, values_BGSE))
        out = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], mask[None, None, None], scale=parts.scale,
            enable_gqa=True,
        )  # fmt: skip
        found.append(out.flatten())
    return torch.stack(found)


@pytest.mark.parametrize("mode", [EXACT, FAST])
@pytest.mark.parametrize("counts", [[1], [16], [60, 4]])
def test_launches_of_a_layer(
    mode: str, counts: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, by numbers of nodes: six, and four products in the exact mode. Nothing is read on the
    host."""
    launched = list[str]()

    def note(kernel: Any, *_: Any, **__: Any) -> None:
        launched.append(kernel.__name__)

    base = fused_base("gemma3")
    verifier = fused_verifier(base, mode)
    assert verifier.fused is not None
    verifier.fused._run = note
    cache = verifier.new_cache(2, 200)
    trees = trees_of([chain(count).parents for count in counts], base.device)
    forward = fused_forward.FusedForward.__call__

    def guarded(*arguments: Any) -> Any:
        with NoHostReads():
            return forward(*arguments)

    monkeypatch.setattr(fused_forward.FusedForward, "__call__", guarded)
    verifier.score(cache, trees, range(len(counts)))
    layers, products = 2, 4 if mode == EXACT else 0
    outside = 2 + (mode == EXACT)  # places, the first norm, the output embedding
    assert len(launched) == layers * (6 + products) + outside


def test_trees_deeper_than_a_tail_begin_as_chains() -> None:
    def branching_at(depth: int, size: int) -> Any:
        parents = [*range(-1, size - 1)]
        return shape_of((*parents, depth))

    assert ancestors_in_place([chain(300), shape_of(PARENTS[0])])
    assert ancestors_in_place([branching_at(40, 60)])  # behind what is read as prefix
    assert not ancestors_in_place([chain(3), branching_at(0, 60)])
    verifier = fused_verifier(fused_base("llama"))
    cache = verifier.new_cache(1, 200)
    scored = score_as_torch(verifier, cache, [branching_at(0, 60).parents])
    assert verifier.num_loose == 1
    assert "a tree too deep" in verifier.steps_run_by
    assert scored


def score_as_torch(verifier: Verifier, cache: TreeCache, parents: Any) -> bool:
    trees = trees_of(parents, verifier.base.device)
    expected = Verifier.score(verifier, cache, trees, [0]).logits_NV
    return torch.allclose(verifier.score(cache, trees, [0]).logits_NV, expected, atol=1e-5)


def test_splits_begin_where_the_kernels_say() -> None:
    from medusa_kit.infer.device.fused import attention

    assert attention.TAIL.value == fused_tiles.TAIL
    assert fused_tiles.DEEPEST == attention.DEEPEST.value == 64 - attention.STEP.value - 1
    assert fused_tiles.num_splits(48) == 0
    assert fused_tiles.num_splits(49) == 1
    assert fused_tiles.num_splits(2048 + 48) == 16
    assert fused_tiles.num_splits(2048 + 49) == 17
    assert fused_tiles.num_splits(131072) <= fused_tiles.MAX_SPLITS


def test_the_description_says_how_norms_round() -> None:
    assert FusedModel.of(fused_base("llama")).rounds_first
    assert not FusedModel.of(fused_base("gemma3")).rounds_first


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_in_16_bits_it_is_as_near_to_the_truth_as_torch(name: str) -> None:
    """Float16, since the interpreter has no bfloat16 products: rounded at the same places."""
    base = wrap_model(fused_model(name).half(), None, name)
    exact = fused_model(name).half().float()
    verifier = fused_verifier(base)
    cache, prompts = verifier.new_cache(2, 200), [random_tokens(90, 7), random_tokens(6, 8)]
    read_by_torch(verifier, cache, [0, 1], prompts)
    parents = ((-1, 0, 0, 1), (-1, 0))
    trees = trees_of(parents, base.device)
    expected = plain_logits(exact, prompts, trees, parents)
    plain = Verifier.score(verifier, cache, trees, [0, 1]).logits_NV
    fused = verifier.score(cache, trees, [0, 1]).logits_NV
    error, own = (float((one.float() - expected).abs().max()) for one in (fused, plain))
    assert error < 2 * own
    assert own < 0.1
