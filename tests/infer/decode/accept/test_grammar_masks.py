"""Masks of a grammar: right at any node's prefix, stop tokens where it may end, clear refusals."""

import math
import random
import sys
from typing import Any

import pytest
import torch
from support.batches import Serving, served
from support.serving.grammars import PADDED, STOPS, allowed_after, tokenizer, writing_base
from support.small_engines import build_engine, endless_base
from support.tiny_models import tiny_base

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.infer.decode.accept.grammar import GrammarMask, grammar_mask
from medusa_kit.infer.decode.grammars.check import check_grammar
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.settings.grammar import Grammar
from medusa_kit.settings.sampling import SamplingParams

PROMPT = [7, 8, 9]
SCHEMA = Grammar.json_schema(
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "abab"]}},
     "required": ["a"], "x-guidance": {"whitespace_flexible": False}}
)  # fmt: skip

TOO_COMPLEX = "((a{1,1000}){1,1000}){1,1000}"  # after some tokens
LONG_AND_COMPLEX = "((a{1,1000}){1,1000}){300,1000}"  # and cannot end before


def mask_of(grammar: Grammar) -> GrammarMask:
    return grammar_mask(grammar, tokenizer(), PADDED, frozenset(STOPS), len(PROMPT))


def allowed(mask: GrammarMask, answer: list[int]) -> set[int]:
    scores = mask(torch.tensor([[*PROMPT, *answer]]), torch.zeros(1, PADDED))
    return set((scores[0] == 0).nonzero()[:, 0].tolist())


def ids_of(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False).input_ids)


def test_masks_are_right_at_any_prefix_in_any_order() -> None:
    """As a walk over trees asks for them: forward, back, to other branches; against a matcher made
    anew each time."""
    mask, chance, answers, ended = mask_of(SCHEMA), random.Random(0), [list[int]()], 0
    for _ in range(300):
        answer = chance.choice(answers)
        expected = allowed_after(SCHEMA, answer)
        assert allowed(mask, answer) == expected
        token = chance.choice(sorted(expected))
        if token in STOPS:  # what comes after it is dropped
            assert len(allowed(mask, [*answer, token])) == PADDED
            ended += 1
        else:
            answers.append([*answer, token])
    assert max(map(len, answers)) > 12
    assert ended > 5


def test_stop_tokens_are_allowed_where_the_grammar_may_end() -> None:
    mask = mask_of(Grammar.regex("a{2,3}"))
    a = ids_of("a")
    assert allowed(mask, a) == set(a)
    assert allowed(mask, a * 2) == {*a, *STOPS}
    assert allowed(mask, a * 3) == set(STOPS)


def test_below_a_guess_that_is_not_allowed_nothing_is_masked() -> None:
    mask = mask_of(Grammar.regex("ab"))
    assert len(allowed(mask, ids_of("x"))) == PADDED
    assert len(allowed(mask, ids_of("xy"))) == PADDED
    assert allowed(mask, []) == set(ids_of("ab"))


def test_a_grammar_that_nothing_can_begin_is_refused_too() -> None:
    """A rule that is itself, which a check without a tokenizer does not notice."""
    with pytest.raises(ConfigError, match="cannot be used: no answer can begin"):
        mask_of(Grammar.lark("start: start"))


def test_a_limit_that_is_met_is_told_without_the_grammar() -> None:
    mask = mask_of(Grammar.regex(TOO_COMPLEX))

    def follow() -> None:
        for length in range(60):
            allowed(mask, ids_of("a") * length)

    with pytest.raises(MedusaKitError, match="could not be followed after") as told:
        follow()
    assert "{1,1000}" not in str(told.value)
    assert "<" not in str(told.value)
    again = mask_of(Grammar.regex(TOO_COMPLEX))  # which others use, too
    assert allowed(again, ids_of("a")) >= set(ids_of("a"))


def test_choices_are_taken_literally() -> None:
    texts = ['"a" | "b"', "\\d+", "é\n", "a.c"]
    mask = mask_of(Grammar.choices(texts))
    for text in texts:
        assert allowed(mask, ids_of(text)) == set(STOPS)
    assert not allowed_after(Grammar.choices(texts), ids_of("a")) & set(ids_of("x"))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.json_schema({"allOf": [{"type": "string"}, {"type": "number"}]}), "Unsatisfiable"),
        (Grammar.json_schema({"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
        (Grammar.json_schema({"not": {"type": "string"}}), r'Unimplemented keys: \["not"\]'),
        (Grammar.json_schema({"type": "stringg"}), "Invalid type: stringg"),
        (Grammar.json_schema({"$ref": "http://127.0.0.1/x"}), "the schema has no 'http"),
        (Grammar.json_schema({"properties": {"n": {"maximum": 2**53 + 1}}}), "the bound 9007"),
        (Grammar.json_schema({"items": {"$ref": "#/no"}}), "the schema has no '#/no'"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.lark("start: a"), 'unknown name: "a"'),
    ],
)
def test_a_grammar_that_cannot_be_met_is_refused_before_anything_is_decoded(
    grammar: Grammar, said: str
) -> None:
    engine = build_engine(writing_base())
    forwards = list[Any]()
    engine.base.model.register_forward_pre_hook(lambda *forward: forwards.append(forward))
    with pytest.raises(ConfigError, match=f"(?s)cannot be used: .*{said}"):
        engine.generate(PROMPT, max_new_tokens=4, grammar=grammar)
    with pytest.raises(ConfigError, match=f"(?s)cannot be used: .*{said}"):
        check_grammar(grammar)
    assert not forwards


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.json_schema("[1]"), "list; expected an object"),
        (lambda: Grammar.json_schema({"enum": [float("nan")]}), "cannot be written"),
        (lambda: Grammar.regex(""), "not an empty one"),
        (lambda: Grammar.lark(5), "type int"),
        (lambda: Grammar.choices([]), "at least one"),
        (lambda: Grammar.choices(["a", "\ud800"]), "choice has half of a surrogate pair"),
        (lambda: Grammar.json_schema({"enum": ["\udfff"]}), "half of a surrogate pair"),
        (lambda: Grammar.choices("yes"), "list of texts"),
        (lambda: SamplingParams(grammar={"type": "object"}), "type dict; expected a Grammar"),
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_base_that_cannot_follow_one_says_why() -> None:
    some = Grammar.regex("a+")
    with pytest.raises(ConfigError, match="without a tokenizer"):
        build_engine(tiny_base("llama")).generate(PROMPT, grammar=some)
    endless = wrap_model(endless_base(PADDED).model, tokenizer(), "endless")
    endless.model.generation_config.eos_token_id = []
    with pytest.raises(ConfigError, match="without a stop token"):
        build_engine(endless).generate(PROMPT, grammar=some)
    with pytest.raises(ConfigError, match="tokenizer: Only fast tokenizers"):
        grammar_mask(some, frozenset(), PADDED, frozenset(STOPS), 1)


def test_without_llguidance_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"(?s)llguidance.*\[grammar\]"):
        check_grammar(Grammar.regex("of no other test"))  # what was found is kept
    check_grammar(None)


def two_rows(
    engine: Engine, drafter: str, patterns: tuple[str, str], tokens: int = 9
) -> list[Request]:
    """Decoded from the same step on, with one drafter."""
    built = engine.drafter_for(drafter, {}, 2)
    scheduler = Serving(engine.verifier, 2)
    rows = [
        make_request(
            engine.verifier, PROMPT, SamplingParams(grammar=Grammar.regex(pattern)), tokens
        )
        for pattern in patterns
    ]
    for row in rows:
        scheduler.add(row, built)
    served(scheduler, rows)
    return rows


@pytest.mark.parametrize("drafter", ["none", "draft-model", "auto"])
def test_a_row_whose_grammar_leaves_no_token_fails_alone(drafter: str) -> None:
    """The base bans what the grammar asks for. Rows of one drafter draft together."""
    base = writing_base()
    base.model.generation_config.suppress_tokens = [*ids_of("b"), *ids_of("ab")]
    engine = build_engine(base, draft_model=writing_base())
    stuck, fine = two_rows(engine, drafter, ("[ax]{4}b", "[ax]{8}"))
    assert isinstance(stuck.error, MedusaKitError)
    assert "no token can follow the answer's first 4" in str(stuck.error)
    assert (fine.finish_reason, fine.error) == ("stop", None)


@pytest.mark.parametrize("drafter", ["none", "draft-model", "auto"])
def test_a_grammar_that_meets_a_limit_fails_alone(drafter: str) -> None:
    engine = build_engine(writing_base(), draft_model=writing_base())
    limited, fine = two_rows(engine, drafter, (LONG_AND_COMPLEX, "[ax]{8}"), 60)
    assert "could not be followed after" in str(limited.error)
    assert (fine.finish_reason, fine.error) == ("stop", None)


def test_typical_acceptance_keeps_to_the_grammar() -> None:
    result = build_engine(writing_base()).generate(
        PROMPT, max_new_tokens=40, drafter="prompt-lookup", temperature=0.9, acceptance="typical",
        grammar=Grammar.regex("(ab){3,6}"),
    )  # fmt: skip
    assert result.finish_reason == "stop"
    assert result.text.replace("ab", "") == ""


def test_the_mask_counts_before_top_k_and_in_probabilities() -> None:
    """With top-k 1 the likeliest of the allowed tokens is left, not the likeliest of all."""
    engine = build_engine(writing_base())
    params = SamplingParams(1.0, top_k=1, grammar=Grammar.regex("[xyz]"))
    row = make_request(engine.verifier, PROMPT, params, 4)
    logits_V = torch.arange(PADDED).float()
    possible_V = row.sampler.scores(logits_V, PROMPT) > -math.inf
    assert possible_V.nonzero().tolist() == [[max(ids_of("xyz"))]]
    assert not row.sampler.takes_argmax


def test_what_is_allowed_and_what_is_forced() -> None:
    stop = STOPS[0]
    mask = grammar_mask(
        Grammar.regex("x(abc|abd)y?"), tokenizer(), PADDED, frozenset([stop]), len(PROMPT)
    )

    def text(words: str, *more: int) -> list[int]:
        return [*PROMPT, *ids_of(words), *more]

    assert mask.forced(PROMPT) == ids_of("xab")
    assert mask.forced(text("x")) == ids_of("ab")
    assert mask.forced(text("xab")) == []
    assert mask.forced(text("xabcy")) == [stop]
    assert mask.forced(text("xabcy", stop)) == mask.forced(text("q")) == []
    for words in ("", "xab", "xabd", "xabcy"):
        assert mask.allows(text(words)), words
    assert [mask.allows(text(words, stop)) for words in ("xab", "xabc", "xabcy")] == [0, 1, 1]
    assert not mask.allows(text("xabcy", stop, stop))
    assert not mask.allows(text("xb"))
