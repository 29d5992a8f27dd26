"""Draws under a grammar follow the exact distribution: the processed one among the tokens that the
grammar allows after each prefix. As in test_sampling.py, with the grammar written out by hand.

Shapes: V vocabulary, S sequences, T tokens.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.exact_distribution import (
    LEVEL,
    PROMPT,
    Rule,
    chi_square_p_value,
    exact_distribution,
    power,
    right,
)
from support.small_engines import build_engine, decode_all, endless_base, random_heads
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.settings.grammar import Grammar
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree

LETTERS, STOP = "abcdefg", 7
PAIRS = Grammar.regex("(a[b-e]|b[ac-f]|[c-g][a-d]){5,6}")  # longer than any answer here
FOLLOW = {0: range(1, 5), 1: (0, 2, 3, 4, 5)}
BATCH, DRAWS, TOKENS = 64, 1024, 3
FULL_TREE = CandidateTree(
    [*[(a,) for a in range(4)], *[(a, b) for a in range(4) for b in range(3)]]
)


def allowed(answer: list[int]) -> list[int]:
    """By the grammar, which none of these answers comes to the end of."""
    return [*range(7)] if len(answer) % 2 == 0 else [*FOLLOW.get(answer[-1], range(4))]


def masked(logits_V: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return torch.full_like(logits_V, -math.inf).index_copy(
        0, torch.tensor(tokens), logits_V[tokens]
    )


def under(params: SamplingParams) -> Rule:
    rest = right(params)
    return lambda logits_V, answer: rest(masked(logits_V, allowed(answer)), answer)


def mask_last(params: SamplingParams) -> Rule:
    """The mask on what top-k and top-p have left."""
    rest = right(params)

    def rule(logits_V: torch.Tensor, answer: list[int]) -> torch.Tensor:
        kept_V = masked(rest(logits_V, answer), allowed(answer))
        return kept_V.log_softmax(-1) if kept_V.isfinite().any() else rest(logits_V, answer)

    return rule


def of_the_parent(params: SamplingParams) -> Rule:
    """The mask of the prefix before the last token."""
    rest = right(params)
    return lambda logits_V, answer: rest(masked(logits_V, allowed(answer[:-1])), answer)


@dataclass(frozen=True)
class Case:
    params: SamplingParams
    wrong: dict[str, Any]


SMOOTH, NARROW = SamplingParams(0.8), SamplingParams(1.0, top_k=4, top_p=0.8)
CASES = {
    "smooth": Case(SMOOTH, {"parent": of_the_parent(SMOOTH), "none": right(SMOOTH),
                            "warmer": under(replace(SMOOTH, temperature=0.96))}),
    "narrow": Case(NARROW, {"parent": of_the_parent(NARROW), "mask last": mask_last(NARROW),
                            "no top-p": under(replace(NARROW, top_p=None))}),
}  # fmt: skip


def lettered_base(seed: int = 0) -> BaseModel:
    """Seven letters and a stop token."""
    vocabulary = {letter: index for index, letter in enumerate(LETTERS)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    assert tokenizer.eos_token_id == STOP
    model = endless_base(8, seed=seed).model
    model.generation_config.eos_token_id = STOP
    return wrap_model(model, tokenizer, "lettered")


@pytest.fixture(scope="module")
def engine() -> Engine:
    base = lettered_base()
    engine = build_engine(base, heads=random_heads(base, num_heads=2), tree=FULL_TREE)
    engine.draft_model = lettered_base(seed=1)
    return engine


def drafter_of(engine: Engine, name: str, params: SamplingParams) -> Drafter:
    if name == "medusa":
        assert engine.heads is not None
        return draft_with(engine.heads, engine.tree)
    return engine.drafter_for("draft-model", {"threshold": 0}, BATCH, params)


def draws(engine: Engine, name: str, params: SamplingParams) -> tuple[torch.Tensor, float]:
    """(answers_ST, mean accepted depth)."""
    answers, accepted, steps = [], 0, 0
    for start in range(0, DRAWS, BATCH):
        settings = [
            replace(params, seed=seed, grammar=PAIRS) for seed in range(start, start + BATCH)
        ]
        drafter = drafter_of(engine, name, settings[0])
        for row in decode_all(engine, drafter, [PROMPT] * BATCH, TOKENS, settings):
            answers.append(row.token_ids)
            accepted += sum(depth * count for depth, count in row.depth_counts.items())
            steps += row.num_steps
    return torch.tensor(answers), accepted / steps


@pytest.mark.parametrize(("case", "name"), [("smooth", "medusa"), ("narrow", "a draft model's")])
def test_draws_under_a_grammar_follow_the_exact_distribution(
    engine: Engine, case: str, name: str
) -> None:
    params = CASES[case].params
    answers_ST, accepted = draws(engine, name, params)
    assert accepted > 0.3, "the test needs drafts that are accepted"
    assert chi_square_p_value(answers_ST, exact_distribution(under(params), TOKENS)) > LEVEL


def test_the_test_has_the_power_to_reject_wrong_masks() -> None:
    for case in CASES.values():
        exact = exact_distribution(under(case.params), TOKENS)
        assert len(exact) >= 16
        assert power(DRAWS, exact, exact, 200) < 0.03
        for name, rule in case.wrong.items():
            assert power(DRAWS, exact, exact_distribution(rule, TOKENS), 20) == 1.0, name
