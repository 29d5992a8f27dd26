"""Within int16 and int8 a token's logits have the same bits in any call: pieces of prompts, trees,
rows beside it, threads, what earlier calls have read.

Shapes: N nodes, V vocabulary.
"""

import functools
import itertools
import random

import pytest
import torch
from support.callers import all_at_once
from support.kernels.rounded import (
    CONTEXT,
    KINDS,
    PRECISIONS,
    base_of,
    engine_of,
    logits_after,
    multiplies_integers,
    plainly,
    some,
)
from support.small_engines import build_engine, random_prompt, reusing
from torch import Tensor

from medusa_kit.engine.engine import Engine
from medusa_kit.infer.cpu.binding.kernels import MAX_ROWS
from medusa_kit.infer.cpu.cache_dtype import store_cache_as
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.verifier import Verifier

pytestmark = pytest.mark.skipif(not multiplies_integers(), reason="no integers are multiplied here")
PAIRS = list(itertools.product(KINDS, PRECISIONS))
CACHES = ("float32", "float16")
CPU = torch.device("cpu")


@functools.cache
def engine_for(kind: str, activations: str) -> Engine:
    return engine_of(kind, activations, {}, tree=[[0], [1], [0, 0], [2], [0, 1], [1, 0]])


def random_tree(draw: random.Random, size: int, vocab: int) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a root and what hangs below it."""
    parents = [-1, *(draw.randrange(node) for node in range(1, size))]
    return [draw.randrange(3, vocab) for _ in parents], parents


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], tokens, parents), tokens[node]]


def nodes_of(trees: list[tuple[list[int], list[int]]]) -> Forest:
    tokens, parents = zip(*trees, strict=True)
    return Forest.of(tokens, parents, torch.device("cpu"))


def read_in_pieces(
    verifier: Verifier, texts: list[list[int]], draw: random.Random
) -> tuple[list[Tensor], object]:
    """(logits_V at the end of each text, the cache); pieces of random size, of several rows."""
    cache = verifier.new_cache(len(texts), CONTEXT + 64)
    done, ends = [0] * len(texts), [torch.empty(0)] * len(texts)
    while waiting := [row for row, text in enumerate(texts) if done[row] < len(text)]:
        rows = sorted(draw.sample(waiting, draw.randint(1, len(waiting))))
        pieces = [texts[row][done[row] :][: draw.choice([1, 2, 7, 64, MAX_ROWS])] for row in rows]
        _, logits_BV = verifier.read_prompts(cache, rows, pieces)
        for row, piece, logits_V in zip(rows, pieces, logits_BV, strict=True):
            done[row] += len(piece)
            ends[row] = logits_V.clone()
    return ends, cache


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("kind", "activations"), some(PAIRS, 3))
def test_bits_are_those_of_one_token_a_call(
    kind: str, activations: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are read in random pieces, then random trees follow, several of them in more calls than
    one. Keys in 16 bits are another precision, in which the same holds."""
    verifier = engine_for(kind, activations).verifier
    monkeypatch.setattr(verifier, "cache_dtype", None)  # else it would stay for later tests
    store_cache_as(cache, verifier)
    draw, vocab = random.Random(f"{kind} {activations}"), verifier.base.info.vocab_size
    texts = [random_prompt(length, length) for length in (1, 9, 130, CONTEXT - 4, 40)]
    with torch.inference_mode():
        ends, filled = read_in_pieces(verifier, texts, draw)
        for text, end_V in zip(texts, ends, strict=True):
            assert torch.equal(logits_after(verifier, text)[-1], end_V)
        sizes = (MAX_ROWS, 1, 90, 4, 170)
        trees = [random_tree(draw, size, vocab) for size in sizes]
        logits_NV = verifier.score(filled, nodes_of(trees), range(len(texts))).logits_NV
        for text, (tokens, parents), found_NV in zip(
            texts, trees, logits_NV.split(sizes), strict=True
        ):
            for node in draw.sample(range(len(tokens)), min(5, len(tokens))):
                path = path_to(node, tokens, parents)
                if len(text) + len(path) <= CONTEXT:
                    assert torch.equal(logits_after(verifier, [*text, *path])[-1], found_NV[node])


@pytest.mark.parametrize("activations", PRECISIONS)
def test_several_threads(activations: str, many_threads: None) -> None:
    engine = engine_for("llama", activations)
    text = random_prompt(100, 5)
    with torch.inference_mode():
        ends, _ = read_in_pieces(engine.verifier, [text] * 3, random.Random(1))
        torch.set_num_threads(1)
        alone_V = logits_after(engine.verifier, text)[-1]
    assert all(torch.equal(end_V, alone_V) for end_V in ends)


@pytest.mark.slow
@pytest.mark.parametrize("activations", PRECISIONS)
def test_more_prompts_than_one_call_takes(activations: str) -> None:
    """All in one batch, at whose steps there are more roots, too."""
    engine = engine_for("llama-tied", activations)
    prompts = [random_prompt(2 + seed % 7, seed) for seed in range(MAX_ROWS + 40)]
    expected = [plainly(engine.verifier, prompt, 6) for prompt in prompts]
    for drafter in ("none", "medusa"):
        results = engine.generate(
            prompts, batch_size=len(prompts), max_new_tokens=6, drafter=drafter
        )
        assert [result.token_ids for result in results] == expected
    assert results[0].stats.steps_run_by == engine.steps_run_by


@pytest.mark.parametrize(("kind", "activations"), some(PAIRS, 2))
def test_long_prompts_in_batches_of_every_size(kind: str, activations: str) -> None:
    engine = engine_for(kind, activations)
    prompts = [random_prompt(length, length) for length in (290, 3, 270, 256, 257, 40, 1)]
    expected = [plainly(engine.verifier, prompt, 12) for prompt in prompts]
    for size in (1, 2, 3, 7):
        engine.scheduler = reusing(engine.verifier)
        results = engine.generate(prompts, batch_size=size, max_new_tokens=12, drafter="medusa")
        assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(("kind", "activations"), some(PAIRS, 2))
def test_prefixes_that_earlier_calls_have_read(kind: str, activations: str) -> None:
    """Keys of an answer were nodes of trees, those of a prompt pieces of it."""
    engine = engine_for(kind, activations)
    text, shared = random_prompt(60, 3), 0
    for turn in range(4):
        expected = plainly(engine.verifier, text, 20)
        result = engine.generate(
            text, max_new_tokens=20, drafter="medusa" if turn % 2 else "suffix"
        )
        assert result.token_ids == expected
        shared += result.stats.cached_tokens
        text = [*text, *expected, *random_prompt(5, turn)]
    assert shared > 60
    drawn = {"max_new_tokens": 20, "temperature": 0.8, "seed": 4}
    kept = engine.generate(text[:-9], drafter="auto", **drawn).token_ids
    engine.scheduler = reusing(engine.verifier)
    assert engine.generate(text[:-9], drafter="none", **drawn).token_ids == kept


@pytest.mark.parametrize("activations", PRECISIONS)
def test_rows_that_join_while_others_run(activations: str) -> None:
    """Prompts are read in small pieces between steps; more rows ask than there are places."""
    engine = engine_for("qwen3", activations)
    prompts = [random_prompt(5 + 60 * (seed % 5), seed) for seed in range(12)]
    expected = [plainly(engine.verifier, prompt, 16) for prompt in prompts]
    with engine.shared_batch(max_rows=3, max_pause=0.0005) as shared:
        names = itertools.cycle(["medusa", "none", "auto", "suffix"])
        given = [
            shared.submit(prompt, max_new_tokens=16, drafter=name)
            for prompt, name in zip(prompts, names, strict=False)
        ]
        assert [one.result().token_ids for one in given] == expected


def test_engines_of_all_precisions_over_one_base_at_once() -> None:
    base = base_of("gemma3")  # whose windows the engines share
    asked = ("float32", *PRECISIONS)
    engines = [build_engine(base, weights="int8", activations=one) for one in asked]
    prompts = [random_prompt(4 + 9 * seed, seed) for seed in range(6)]
    expected = [[plainly(one.verifier, prompt, 16) for prompt in prompts] for one in engines]
    names = ("suffix", "recycling", "auto")

    def visit(number: int) -> list[list[int]]:
        engine, name = engines[number % 3], names[number // 3]
        return [
            engine.generate(prompt, drafter=name, max_new_tokens=16).token_ids for prompt in prompts
        ]

    found = all_at_once(visit, 9)
    assert found == [expected[number % 3] for number in range(9)]
    assert expected[0] != expected[2]
