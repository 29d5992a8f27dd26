"""The promise under a grammar, for every drafter by its name: greedy answers are those of plain
transformers generate with the same masks, and a seed's text is the same whoever guesses."""

import json

import pytest
from support.serving.grammars import STOPS, plain_under, tokenizer, writing_base, writing_model
from support.small_engines import engine_with_heads

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.settings.drafters import BROUGHT_ALONG, DRAFTERS
from medusa_kit.settings.grammar import Grammar

OPTIONS: dict[str, list[dict]] = {
    "auto": [{"sources": ["medusa", "draft-model", "suffix", "prompt-lookup", "recycling"]}],
    "draft-model": [{"threshold": 0}, {"staged": {"drafter": "suffix"}}],
}  # fmt: skip
ANYWHERE = [name for name in DRAFTERS if name not in BROUGHT_ALONG]
CASES = [(name, options) for name in ANYWHERE for options in OPTIONS.get(name, [{}])]
TIGHT = {"x-guidance": {"whitespace_flexible": False}}
SCHEMA = {
    "type": "object", "required": ["name", "tags", "n"], "additionalProperties": False, **TIGHT,
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["abab", "ab", "xyz"]}, "maxItems": 3},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
}  # fmt: skip
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex("(ab|ba)+[0-9]{2,9}"),
    "choices": Grammar.choices(['say "ab"', "say \\ no", "né\n"]),
    "lark": Grammar.lark('start: "(" start ")" | "[" start "]" | "ab"'),
}
PROMPTS = ['{"name":"abab","tags":["ab","abab"],"n":12}' * 2, "(([ab])) ab12 né"]
TOKENS = 80
SAMPLING: dict = {"temperature": 1.2, "top_k": 30, "seed": 3, "max_new_tokens": TOKENS,
                  "grammar": GRAMMARS["schema"]}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = engine_with_heads(writing_base())
    engine.draft_model = wrap_model(writing_model(), tokenizer(), "the same")
    return engine


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [tokenizer()(text).input_ids for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    return {
        name: [plain_under(grammar, prompt, TOKENS) for prompt in prompts]
        for name, grammar in GRAMMARS.items()
    }


@pytest.fixture(scope="module")
def drawn(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """A seed's text by plain decoding."""
    return [one.token_ids for one in engine.generate(prompts, drafter="none", **SAMPLING)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_greedy_answers_are_plain_ones_under_the_same_masks(
    engine: Engine, prompts: list[list[int]], expected: dict[str, list[list[int]]], name: str,
    options: dict,
) -> None:  # fmt: skip
    for kind, grammar in GRAMMARS.items():
        results = engine.generate(
            prompts, drafter=name, drafter_options=options, max_new_tokens=TOKENS, grammar=grammar
        )
        assert [result.token_ids for result in results] == expected[kind], kind


def test_the_answers_are_worth_the_test(expected: dict[str, list[list[int]]]) -> None:
    """They end by themselves, and the schema's are such that json reads them."""
    for text in (tokenizer().decode(ids[:-1]) for ids in expected["schema"]):
        assert set(json.loads(text)) == {"name", "tags", "n"}
    for kind in ("schema", "choices"):
        assert all(ids[-1] in STOPS for ids in expected[kind])


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_seed_says_the_same_and_keeps_to_the_grammar(
    engine: Engine, prompts: list[list[int]], drawn: list[list[int]], name: str, options: dict
) -> None:
    drafted = engine.generate(prompts, drafter=name, drafter_options=options, **SAMPLING)
    for result in drafted:
        assert result.finish_reason == "stop"
        assert set(json.loads(result.text)) == {"name", "tags", "n"}
    assert [result.token_ids for result in drafted] == drawn


def test_drafts_are_accepted_under_a_grammar(engine: Engine, prompts: list[list[int]]) -> None:
    result = engine.generate(
        prompts[0], drafter="draft-model", max_new_tokens=TOKENS, grammar=GRAMMARS["schema"]
    )
    assert result.stats.acceptance_length > 2


def test_rows_of_one_batch_have_grammars_of_their_own(
    engine: Engine, prompts: list[list[int]], expected: dict[str, list[list[int]]]
) -> None:
    """With one row free of any, and drafters of several kinds."""
    free = engine.generate(prompts[0], drafter="none", max_new_tokens=24)
    with engine.shared_batch(max_rows=8) as batch:
        answers = {
            (kind, number): batch.submit(
                prompt, drafter=drafter, max_new_tokens=TOKENS, grammar=grammar
            )
            for kind, grammar in GRAMMARS.items()
            for number, (prompt, drafter) in enumerate(
                zip(prompts, ("suffix", "medusa"), strict=True)
            )
        }
        unbound = batch.submit(prompts[0], max_new_tokens=24)
        for (kind, number), answer in answers.items():
            assert answer.result().token_ids == expected[kind][number], (kind, number)
        assert unbound.result().token_ids == free.token_ids


def test_an_answer_that_is_cut_says_so(
    engine: Engine, prompts: list[list[int]], expected: dict[str, list[list[int]]]
) -> None:
    whole = expected["schema"][0]
    given = {"drafter": "draft-model", "grammar": GRAMMARS["schema"]}
    cut = engine.generate(prompts[0], max_new_tokens=len(whole) - 1, **given)
    assert (cut.token_ids, cut.finish_reason) == (whole[:-1], "length")
    assert engine.generate(prompts[0], max_new_tokens=TOKENS, **given).finish_reason == "stop"


FORCED = Grammar.lark(
    'start: "The answer is: " /[ab]/ "." (" It is certain." | " Perhaps.") /[ab]?/'
)


@pytest.mark.parametrize("beside", [0, 1])
def test_what_the_grammar_forces_is_guessed(
    engine: Engine, prompts: list[list[int]], beside: int
) -> None:
    """So there are many fewer steps than tokens, though nobody else could guess such an answer.
    `beside`: requests of the same batch without a grammar."""
    expected = plain_under(FORCED, prompts[0], TOKENS)
    asked: dict = {"drafter": "auto", "drafter_options": {"sources": ["prompt-lookup"]},
                   "max_new_tokens": TOKENS}  # fmt: skip
    with engine.shared_batch(max_rows=2) as batch:
        free = [batch.submit(prompts[1], **asked) for _ in range(beside)]
        result = batch.submit(prompts[0], grammar=FORCED, **asked).result()
        assert result.token_ids == expected
        assert result.stats.num_steps <= len(expected) / 2
        for answer in free:
            assert answer.result().stats.new_tokens >= result.stats.num_steps
