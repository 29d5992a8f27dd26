"""The promise for every drafter by its name: greedy answers are plain transformers generate's, and
a seed's text is the same whoever guesses.

Rows differ in length, one ends at the context's end, and stop tokens fall inside drafts. Prompts
repeat themselves, so that copies are right now and then; the draft model is the base's own weights
or another's.
"""

import pytest
from support.partly_knowing import plain_answer
from support.small_engines import engine_with_heads, random_prompt
from support.tiny_models import CONTEXT, VOCAB, tiny_base

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.settings.drafters import BROUGHT_ALONG, DRAFTERS

FAMILIES = ("llama", "gemma3", "gpt2")
OPTIONS: dict[str, list[dict]] = {
    "auto": [
        {},
        {"sources": ["medusa", "draft-model", "suffix", "prompt-lookup", "recycling"]},
        {"sources": ["suffix", "draft-model"], "max_nodes": 5},
    ],
    "draft-model": [{}, {"width": 2, "lengths": "fixed"}, {"staged": {"drafter": "suffix"}}],
    "lookahead": [{"window": 3, "ngram": 3, "guesses": 3}],
}
ANYWHERE = [name for name in DRAFTERS if name not in BROUGHT_ALONG]
CASES = [(name, options) for name in ANYWHERE for options in OPTIONS.get(name, [{}])]
PROMPTS = [random_prompt(7, 1) * 4, random_prompt(5, 2), random_prompt(CONTEXT - 12, 3)]
TOKENS = 30


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Engine:
    engine = engine_with_heads(tiny_base(request.param))
    model = tiny_base(request.param).model  # the base's own weights: long drafts are right
    engine.draft_model = wrap_model(model, None, "the same")
    return engine


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[int]]:
    family = engine.base.info.name.removeprefix("tiny-")
    return [plain_answer(family, prompt, min(TOKENS, CONTEXT - len(prompt))) for prompt in PROMPTS]


SAMPLING: dict = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "max_new_tokens": TOKENS}


@pytest.fixture(scope="module")
def drawn(engine: Engine) -> list[list[int]]:
    """A seed's text by plain decoding."""
    return [one.token_ids for one in engine.generate(PROMPTS, drafter="none", **SAMPLING)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_greedy_answers_are_plain_ones(
    engine: Engine, expected: list[list[int]], name: str, options: dict
) -> None:
    given = {"drafter": name, "drafter_options": options, "max_new_tokens": TOKENS}
    together = engine.generate(PROMPTS, **given)
    assert [result.token_ids for result in together] == expected
    for prompt, answer in zip(PROMPTS, expected, strict=True):  # and with what was learnt before
        assert engine.generate(prompt, **given).token_ids == answer


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_seed_says_the_same(
    engine: Engine, drawn: list[list[int]], name: str, options: dict
) -> None:
    drafted = engine.generate(PROMPTS, drafter=name, drafter_options=options, **SAMPLING)
    assert [result.token_ids for result in drafted] == drawn
    assert len(set(map(tuple, drawn))) == len(PROMPTS)


def test_the_prompts_are_worth_drafting_for(engine: Engine) -> None:
    """Else the tests above would pass with drafters that never guess right."""
    for name in ("draft-model", "auto", "lookahead"):
        results = engine.generate(PROMPTS, drafter=name, max_new_tokens=TOKENS)
        assert max(result.stats.acceptance_length for result in results) > 1.2, name
    assert max(map(max, PROMPTS)) < VOCAB
