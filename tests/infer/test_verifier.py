"""Rows with different numbers of nodes, or parts of prompts, in one forward of torch: each is
scored as it is alone.
"""

from typing import Any

import pytest
import torch
from support.small_engines import random_prompt
from support.tiny_models import EVERY, tiny_base

from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.attention.step import current_step
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.self_check import check_backends, check_trees
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier

CPU = torch.device("cpu")
TREES = [(-1,), (-1, 0, 0, 1, 2, 2, 3), (-1, 0, 1)]
PROMPTS = [random_prompt(length, length) for length in (9, 4, 14)]


def nodes_of(trees: list[tuple[int, ...]], seeds: list[int]) -> Forest:
    tokens = [random_prompt(len(tree), seed) for tree, seed in zip(trees, seeds, strict=True)]
    return Forest.of(tokens, trees, CPU)


def filled(verifier: Verifier, num_rows: int = 4) -> TreeCache:
    """Row 1 stays empty, so that the others do not lie side by side."""
    cache = verifier.new_cache(num_rows, 40)
    verifier.read_prompts(cache, [0, 3, 2], PROMPTS)
    return cache


@pytest.mark.parametrize("family", EVERY)
def test_rows_of_different_sizes_are_scored_as_each_alone(family: str) -> None:
    """Two steps, so that keys and values written by the first are read by the second."""
    base = tiny_base(family)
    verifier, rows = Verifier(base, "sdpa"), [3, 0, 2]
    cache = filled(verifier)
    assert cache.lengths == [9, 0, 14, 4]
    alone = [verifier.new_cache(1, 40) for _ in rows]
    for own, prompt in zip(alone, (PROMPTS[1], PROMPTS[0], PROMPTS[2]), strict=True):
        verifier.read_prompts(own, [0], [prompt])
    for trees, kept in ((TREES, [[0], [0, 2, 5], [0, 1]]), (TREES[::-1], [[0, 1], [0], [0]])):
        scores = verifier.score(cache, nodes_of(trees, [1, 2, 3]), rows)
        first = 0
        for seed, (own, tree) in enumerate(zip(alone, trees, strict=True), start=1):
            expected = verifier.score(own, nodes_of([tree], [seed]), [0])
            part = slice(first, first := first + len(tree))
            spread = expected.logits_NV.std()
            assert (scores.logits_NV[part] - expected.logits_NV).abs().max() < 1e-4 * spread
            torch.testing.assert_close(
                scores.hidden_ND[part], expected.hidden_ND, rtol=1e-4, atol=1e-4
            )
        cache.commit(kept, rows)
        for own, nodes in zip(alone, kept, strict=True):
            own.commit([nodes])


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss", "falcon", "deepseek_v3"])
def test_pieces_of_prompts_are_read_as_each_alone(family: str) -> None:
    """New prompts beside ones of which a part has been read, in any order."""
    verifier = Verifier(tiny_base(family), "sdpa")
    cache = filled(verifier, 6)
    rows, more = [5, 3, 1, 0, 4, 2], [random_prompt(n, n) for n in (6, 7, 5, 1, 6, 8)]
    hidden_BD, logits_BV = verifier.read_prompts(cache, rows, more)
    before = {0: PROMPTS[0], 3: PROMPTS[1], 2: PROMPTS[2]}
    for index, (row, piece) in enumerate(zip(rows, more, strict=True)):
        own = verifier.new_cache(1, 40)
        text = before.get(row, []) + piece
        expected = verifier.read_prompts(own, [0], [text])
        assert cache.lengths[row] == len(text)
        torch.testing.assert_close(logits_BV[index], expected[1][0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(hidden_BD[index], expected[0][0], rtol=1e-3, atol=1e-4)


def test_prompts_of_one_length_are_read_in_one_forward() -> None:
    """And others in one for each size: within a power of two."""
    base = tiny_base("gpt2")
    verifier, sizes = Verifier(base, "sdpa"), list[int]()
    base.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: sizes.append(args[0].numel())
    )
    cache = verifier.new_cache(7, 40)
    prompts = [random_prompt(length, 1) for length in (5, 5, 5, 8, 9, 16, 3)]
    verifier.read_prompts(cache, range(7), prompts)
    assert sizes == [5 + 5 + 5 + 8, 9 + 16, 3]


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_rows_are_padded_only_where_the_class_keeps_its_attention(family: str) -> None:
    base = tiny_base(family)
    verifier, sizes = Verifier(base, "sdpa"), list[int]()
    cache = filled(verifier)
    base.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: sizes.append(args[0].numel())
    )
    verifier.score(cache, nodes_of(TREES, [1, 2, 3]), [3, 0, 2])
    padding = [6, 0, 4] if family == "falcon" else [0, 0, 0]
    assert verifier.num_padding([1, 7, 3]) == padding
    assert sizes == [11 + sum(padding)]


def test_a_model_that_minds_nodes_of_all_rows_as_one_row_gets_them_padded() -> None:
    """As a class would that computes something by row."""
    base = tiny_base("llama")
    layer = base.model.model.layers[1].mlp

    def by_row(_: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        step = current_step(layer)
        as_one = step is not None and args[0].shape[0] < len(step.lengths)
        return out * 1.5 if as_one else None

    verifier = Verifier(base, "sdpa")
    assert not verifier.pads
    layer.register_forward_hook(by_row)
    base.changes()  # which is the model from here on
    with pytest.raises(IncompatibleBaseError):
        check_trees(verifier)
    check_backends(verifier)
    assert verifier.pads
    assert Verifier(base, "sdpa").num_padding([1, 4, 2]) == [3, 0, 2]
