"""The promise within int16 and int8, for every drafter by its name: greedy answers are those of one
node a step in the same precision, and a seed's text is the same whoever guesses.

Prompts repeat themselves, one ends near the context's end, and stop tokens fall inside drafts.
"""

import functools
import itertools
from typing import Any

import pytest
from support.drafter_options import NAMED
from support.kernels.rounded import (
    CONTEXT,
    KINDS,
    PRECISIONS,
    draft_model_for,
    engine_of,
    multiplies_integers,
    plainly,
    some,
)
from support.small_engines import random_heads, random_prompt
from support.tiny_models import VOCAB

from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import with_heads
from medusa_kit.settings.drafters import READ_HEADS
from medusa_kit.tree.dynamic import DynamicTree

pytestmark = pytest.mark.skipif(not multiplies_integers(), reason="no integers are multiplied here")
WORKS = list(itertools.product(KINDS, PRECISIONS, range(len(NAMED))))
# Ways of reading hidden states, and a tree for each: static, or grown at each step.
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"kind": "hydra"},
    "recurrent": {"kind": "recurrent"},
}
GROWN = DynamicTree(9, (1.0, 0.9, 0.8), 6)
TREES: dict[str, Any] = {"static": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]],
                         "dynamic": GROWN}  # fmt: skip
WAYS = itertools.cycle(itertools.product(TREES, READ_HEADS))
HEADED = [(*one, *next(WAYS)) for one in itertools.product(KINDS, PRECISIONS, HEADS)]
PROMPTS = [random_prompt(7, 1) * 4, random_prompt(5, 2), random_prompt(CONTEXT - 9, 3)]
TOKENS = 30
SEEDED = {"temperature": 0.7, "top_p": 0.9, "seed": 3}


@functools.cache
def engine_for(kind: str, activations: str) -> Engine:
    engine = engine_of(kind, activations, {}, tree=TREES["static"])
    engine.draft_model = draft_model_for(kind)
    return engine


@functools.cache
def expected(kind: str, activations: str) -> list[list[int]]:
    engine = engine_for(kind, activations)
    return [plainly(engine.verifier, prompt, TOKENS) for prompt in PROMPTS]


@functools.cache
def seeded(kind: str, activations: str) -> list[list[int]]:
    """Each alone, without what others have read."""
    engine = engine_for(kind, activations)
    one = {"drafter": "none", "max_new_tokens": TOKENS, **SEEDED}
    return [engine.generate(prompt, **one).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(("kind", "activations", "number"), some(WORKS, 10))
def test_answers_are_those_of_plain_decoding(kind: str, activations: str, number: int) -> None:
    engine, (name, options) = engine_for(kind, activations), NAMED[number]
    given = {"drafter": name, "drafter_options": options, "max_new_tokens": TOKENS}
    together = engine.generate(PROMPTS, **given)
    assert [result.token_ids for result in together] == expected(kind, activations)
    alone = [engine.generate(prompt, **given).token_ids for prompt in PROMPTS]
    assert alone == expected(kind, activations)  # and with what was learnt before
    drawn = engine.generate(PROMPTS, **given, **SEEDED)
    assert [result.token_ids for result in drawn] == seeded(kind, activations)


@pytest.mark.parametrize(("kind", "activations", "heads", "tree", "name"), some(HEADED, 6))
def test_heads_of_every_kind(kind: str, activations: str, heads: str, tree: str, name: str) -> None:
    plain = engine_for(kind, activations)
    engine = with_heads(plain, random_heads(plain.base, **HEADS[heads]), tree=TREES[tree])
    given = {"drafter": name, "max_new_tokens": TOKENS}
    found = [result.token_ids for result in engine.generate(PROMPTS, **given)]
    assert found == expected(kind, activations)
    drawn = engine.generate(PROMPTS, **given, **SEEDED)
    assert [result.token_ids for result in drawn] == seeded(kind, activations)


def test_the_prompts_are_worth_drafting_for() -> None:
    """Else the tests above would pass with drafters that never guess right, or in any precision."""
    for name in ("draft-model", "auto"):
        engine = engine_for("llama", "int16")
        results = engine.generate(PROMPTS, drafter=name, max_new_tokens=TOKENS)
        assert max(result.stats.acceptance_length for result in results) > 1.2, name
    assert expected("llama", "int8") != expected("llama", "int16")
    assert max(map(max, PROMPTS)) < VOCAB
