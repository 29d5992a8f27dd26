"""Every family that docs/models.md lists: greedy answers equal those of plain transformers.

The wide test is small, one for each family; what costs more (sixteen rows, the context's end, a
stop token inside the tree, texts that begin alike) is asked of those that differ most: windows and
caps, sinks, latent attention, a class that keeps its own attention, chunks, and an index of keys.
"""

import pytest
from support.partly_knowing import answered, answered_in, plain_answer
from support.small_engines import build_engine, random_prompt
from support.tiny_models import CONTEXT, MORE, STOP, tiny_base

from medusa_kit.infer.decode.batch import Batch

DIFFERENT = ["gemma2", "gpt_oss", "deepseek_v3", "falcon", "llama4", "deepseek_v32"]


@pytest.mark.parametrize("family", MORE)
def test_random_trees_in_a_batch(family: str) -> None:
    engine = build_engine(tiny_base(family))
    assert engine.check.relative_error < 1e-4
    prompts = [random_prompt(length, length) for length in (1, 9, 20)]
    truths = {tuple(prompt): plain_answer(family, prompt, 16) for prompt in prompts}
    assert len({token for answer in truths.values() for token in answer}) > 4, "proves too little"
    rows = answered(engine, truths, prompts, 16)
    assert [row.token_ids for row in rows] == list(truths.values())
    assert sum(row.num_steps for row in rows) < sum(len(row.token_ids) for row in rows) - 3


@pytest.mark.parametrize("family", DIFFERENT)
def test_sixteen_rows_of_different_length(family: str) -> None:
    engine = build_engine(tiny_base(family))
    prompts = [random_prompt(length, length) for length in range(1, 17)]
    truths = {tuple(prompt): plain_answer(family, prompt, 12) for prompt in prompts}
    together = answered(engine, truths, prompts, 12)
    assert [row.token_ids for row in together] == list(truths.values())
    alone = answered(engine, truths, prompts[4:5], 12)
    assert alone[0].token_ids == together[4].token_ids


@pytest.mark.parametrize("family", [*DIFFERENT, "opt", "phi3-longrope"])
def test_the_last_tokens_of_the_context(family: str) -> None:
    engine = build_engine(tiny_base(family))
    context = engine.base.info.context_length
    prompt = random_prompt(context - 9, 5)
    expected = plain_answer(family, prompt, 9)
    [row] = answered(engine, {tuple(prompt): expected + random_prompt(8, 1)}, [prompt], 50)
    assert row.token_ids == expected
    assert len(expected) == 9 or expected[-1] == STOP


def test_the_context_of_longrope_ends_at_its_crossing() -> None:
    """Beyond it plain decoding reads the whole text again by other frequencies."""
    assert tiny_base("phi3-longrope").info.context_length == 48
    assert tiny_base("phi3").info.context_length == CONTEXT


@pytest.mark.parametrize("family", DIFFERENT)
def test_a_stop_token_inside_the_tree(family: str) -> None:
    """Drafts run on past it; nothing after it comes out."""
    engine = build_engine(tiny_base(family))
    prompts = [random_prompt(length, length + 40) for length in (3, 8, 14)]
    engine.base.model.generation_config.eos_token_id = None
    free = {tuple(p): plain_answer(family, p, 20, stop=None) for p in prompts}
    stop = next(t for t in free[tuple(prompts[0])][5:] if t not in free[tuple(prompts[0])][:5])
    engine.base.model.generation_config.eos_token_id = stop
    rows = answered(engine, free, prompts, 20)
    for row, answer in zip(rows, free.values(), strict=True):
        end = answer.index(stop) + 1 if stop in answer else len(answer)
        assert row.token_ids == answer[:end]
    assert rows[0].finish_reason == "stop"
    assert rows[0].num_steps < len(rows[0].token_ids) - 1


@pytest.mark.parametrize("family", [*DIFFERENT, "glm_moe_dsa"])
def test_texts_that_begin_alike(family: str) -> None:
    """Slots are read again by a longer text, in the same row and in another."""
    engine, first = build_engine(tiny_base(family)), random_prompt(20, 20)
    batch = Batch(engine.verifier, 2)
    answer = plain_answer(family, first, 12)
    for prompts in ([first], [[*first, *answer, 5], [*first, *random_prompt(6, 2)]]):
        truths = {tuple(prompt): plain_answer(family, prompt, 12) for prompt in prompts}
        rows = answered_in(batch, truths, 12)
        assert [row.token_ids for row in rows] == list(truths.values())
    assert rows[0].num_cached > len(first)
    assert rows[1].num_cached >= len(first)
