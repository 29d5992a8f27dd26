"""The cache of models that carry a state: what is kept, what is read again, what it costs."""

import copy
from dataclasses import dataclass

import pytest
import torch
from support.models.hybrids import tiny_hybrid, tiny_hybrid_base
from support.small_engines import random_prompt

from medusa_kit.errors import ContextLengthError
from medusa_kit.infer.chains.cache import ChainCache
from medusa_kit.infer.chains.choice import verifier_for
from medusa_kit.infer.chains.verifier import ChainVerifier
from medusa_kit.infer.forest import Forest

CPU = torch.device("cpu")
PROMPT = random_prompt(9, 9)


@pytest.fixture(scope="module", params=["qwen3_5", "lfm2", "falcon_h1", "mamba2"])
def verifier(request: pytest.FixtureRequest) -> ChainVerifier:
    found = verifier_for(tiny_hybrid_base(request.param))
    assert isinstance(found, ChainVerifier)
    return found


def started(verifier: ChainVerifier, *prompts: list[int], slots: int = 64) -> ChainCache:
    cache = verifier.new_cache(len(prompts), slots)
    verifier.read_prompts(cache, range(len(prompts)), prompts)
    return cache


def score(verifier: ChainVerifier, cache: ChainCache, *chains: list[int]) -> torch.Tensor:
    nodes = Forest.chains(chains, CPU)
    return verifier.score(cache, nodes, range(len(chains))).logits_NV


def whole(verifier: ChainVerifier, text: list[int]) -> torch.Tensor:
    """logits_TV of a text that is read at once by an untouched model."""
    family = verifier.base.info.name.removeprefix("tiny-")
    with torch.no_grad():
        return tiny_hybrid(family)(torch.tensor([text]), use_cache=False).logits[0]


def near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((actual - expected).abs().max()) < 1e-3 * float(expected.std())


def test_what_was_rejected_leaves_no_trace(verifier: ChainVerifier) -> None:
    cache, text = started(verifier, PROMPT), list(PROMPT)
    for seed, kept in enumerate([1, 3, 4, 2, 1, 1, 4, 1]):  # of chains of four
        chain = random_prompt(4, 100 + seed)
        logits = score(verifier, cache, chain)
        assert near(logits, whole(verifier, [*text, *chain])[-4:])
        cache.commit([range(kept)])
        text += chain[:kept]
        assert cache.lengths[0] + len(cache.unread[0]) == len(text)
        assert bool(cache.unread[0]) == (kept < 4)


def test_scoring_again_changes_nothing(verifier: ChainVerifier) -> None:
    """As after a forward that failed: what is not committed is forgotten."""
    cache = started(verifier, PROMPT)
    first = score(verifier, cache, [5, 6, 7])
    score(verifier, cache, [8, 9])
    assert torch.equal(score(verifier, cache, [5, 6, 7]), first)


def test_rows_are_kept_apart(verifier: ChainVerifier) -> None:
    prompts = [random_prompt(n, n) for n in (4, 9, 9)]
    cache = started(verifier, *prompts)
    chains = [[5, 6, 7], [8], [10, 11, 12]]
    parts = score(verifier, cache, *chains).split([3, 1, 3])
    for prompt, chain, part in zip(prompts, chains, parts, strict=True):
        assert near(part, whole(verifier, [*prompt, *chain])[-len(chain) :])
    cache.commit([range(1), range(1), range(3)])
    cache.grow(128, 4)
    verifier.read_prompts(cache, [3], [[40]])
    parts = score(verifier, cache, [30], [31], [32], [33]).split([1, 1, 1, 1])
    assert near(parts[0], whole(verifier, [*prompts[0], 5, 30])[-1:])
    assert near(parts[1], whole(verifier, [*prompts[1], 8, 31])[-1:])
    assert near(parts[2], whole(verifier, [*prompts[2], 10, 11, 12, 32])[-1:])
    assert near(parts[3], whole(verifier, [40, 33])[-1:])


def test_a_row_goes_on_from_states_that_were_kept(verifier: ChainVerifier) -> None:
    cache = started(verifier, PROMPT, [3])
    chain = random_prompt(4, 1)
    score(verifier, cache, chain, [4])
    cache.commit([range(4), range(1)])
    assert [cache.usable(0, length) for length in (8, 9, 10, 12, 13, 20)] == [0, 9, 9, 9, 13, 13]
    cache.copy_first(0, 1, 9)
    assert near(score(verifier, cache, [7], [8])[1:], whole(verifier, [*PROMPT, 8])[-1:])
    assert cache.lengths == [13, 9]
    cache.keep_first(0, 9)
    assert near(score(verifier, cache, [7], [8])[:1], whole(verifier, [*PROMPT, 7])[-1:])
    cache.forget(0)
    verifier.read_prompts(cache, [0], [[5, 6]])
    assert near(score(verifier, cache, [7], [8])[:1], whole(verifier, [5, 6, 7])[-1:])
    with pytest.raises(KeyError):
        cache.keep_first(0, 1)


def test_states_count_as_memory(verifier: ChainVerifier) -> None:
    cache = verifier.new_cache(2, 64)
    empty = cache.num_bytes
    verifier.read_prompts(cache, range(2), [PROMPT, PROMPT])
    one = sum(t.nbytes for layer in cache._states[0] or () for t in layer if t is not None)
    assert one > 0
    assert cache.num_bytes >= empty + 2 * one


def test_no_more_nodes_than_slots(verifier: ChainVerifier) -> None:
    cache = started(verifier, PROMPT, slots=12)
    with pytest.raises(ContextLengthError, match="4 nodes after 9 tokens"):
        score(verifier, cache, [5, 6, 7, 8])
    assert near(score(verifier, cache, [5]), whole(verifier, [*PROMPT, 5])[-1:])


def test_a_kept_state_is_never_written_to(verifier: ChainVerifier) -> None:
    cache = started(verifier, PROMPT)
    before = copy.deepcopy(cache._states)
    score(verifier, cache, [5, 6, 7])
    score(verifier, cache, [5])
    for layer, old in zip(cache._states[0] or (), before[0] or (), strict=True):
        for tensor, own in zip(layer, old, strict=True):
            assert tensor is own is None or torch.equal(tensor, own)


@dataclass(frozen=True)
class Marked(Forest):
    mark: str


def test_of_a_tree_the_first_path_is_taken(verifier: ChainVerifier) -> None:
    trees = [[3, 4, 5, 6, 7, 8], [9], [1, 2, 3]]
    draft = Forest.of(trees, [[-1, 0, 0, 2, 1, 4], [-1], [-1, 0, 0]], CPU)
    fitted = verifier.fitted(draft)
    assert [shape.parents for shape in fitted.shapes] == [(-1, 0, 1, 2), (-1,), (-1, 0)]
    assert fitted.token_lists() == [[3, 4, 7, 8], [9], [1, 2]]
    assert verifier.fitted(fitted) is fitted


def test_a_draft_keeps_what_its_drafter_put_into_it(verifier: ChainVerifier) -> None:
    draft = Forest.of([[3, 4, 5]], [[-1, 0, 0]], CPU)
    fitted = verifier.fitted(Marked(draft.tokens_N, draft.shapes, "mine"))
    assert isinstance(fitted, Marked)
    assert (fitted.mark, fitted.token_lists()) == ("mine", [[3, 4]])
