"""The tree of each step, for rows that ask for it."""

import pytest
from support.batches import alone, drafters, engine_for, row_for
from support.request_queues import threaded
from support.small_engines import random_prompt

from medusa_kit.infer.decode.request import Emission
from medusa_kit.infer.details import OutputOptions


def checked(emission: Emission) -> int:
    """Checks a step's tree against what it emitted; how many guesses were accepted."""
    assert emission.tree is not None
    parents, tokens, accepted = emission.tree
    assert len(parents) == len(tokens)
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert [parents[node] for node in accepted] == [0, *accepted][: len(accepted)]
    assert [tokens[node] for node in accepted] == emission.tokens[: len(accepted)]
    assert len(accepted) == emission.num_guessed
    return len(accepted)


@pytest.mark.parametrize("name", ["heads", "dynamic", "heads that pay", "recycling", "none"])
def test_emissions_hold_the_trees_of_rows_that_ask(name: str) -> None:
    """With the root that the step before chose, and the path that was emitted, at the end too."""
    engine = engine_for("llama-tied")
    drafter = drafters(engine)[name]
    row, other = row_for(engine, 6, 14), row_for(engine, 9, 14)
    row.output_options = OutputOptions(tree=True)
    with threaded(engine, 2) as thread:
        asks, does_not = thread.submit(row, drafter), thread.submit(other, drafter)
        first, *steps = list(asks)
        others = list(does_not)
    assert row.token_ids == alone("llama-tied", 6, False)
    assert first.tree is None, "the prompt gives the first token"
    root, num_accepted = first.tokens[-1], 0
    for step in steps:
        assert step.tree.tokens[0] == root
        root = step.tokens[-1]
        num_accepted += checked(step)
    assert any(len(step.tree.tokens) > 1 for step in steps) == (name != "none")
    assert num_accepted == sum(depth * n for depth, n in row.depth_counts.items())
    assert all(emission.tree is None for emission in others)
    assert other.tree is None


def test_a_path_that_the_answer_cuts_is_told_as_far_as_it_was_emitted() -> None:
    """However many tokens are asked for."""
    engine = engine_for("llama-tied")
    drafter = drafters(engine)["heads"]
    lengths = set()
    with threaded(engine, 1) as thread:
        for most in range(2, 15):
            row = row_for(engine, 6, most)
            row.output_options = OutputOptions(tree=True)
            *_, last = thread.submit(row, drafter)
            lengths.add(checked(last))
    assert len(lengths) > 1


def test_a_shared_batch_is_asked_for_trees() -> None:
    engine = engine_for("llama-tied")
    prompt = random_prompt(6, 6)
    with engine.shared_batch(max_rows=2) as shared:
        asks = shared.submit(
            prompt, max_new_tokens=6, drafter="medusa", wanted=OutputOptions(tree=True)
        )
        does_not = shared.submit(prompt, max_new_tokens=6, drafter="medusa")
        trees = [emission.tree for emission in asks.submission]
        none = [emission.tree for emission in does_not.submission]
    assert [tree is None for tree in trees] == [True] + [False] * (len(trees) - 1)
    assert set(none) == {None}
