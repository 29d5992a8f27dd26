"""Verify must report right answers as right, wrong ones as bugs, and near-ties as rounding."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_engines import engine_with_heads
from support.tiny_models import STOP, VOCAB, tiny_base, tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.bench.agreement import first_difference
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.verify import verify
from medusa_kit.bench.verify_report import VerifyReport
from medusa_kit.engine.engine import Engine, GenerationResult
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree

PROMPTS = [[5, 6, 7], [40, 41], [11, 90, 33, 8]]
TOKENS = 8
SAMPLED = SamplingParams(temperature=0.8, seed=3)
TOLERANCE = 1e-3


def make_engine(model: Any = None) -> Engine:
    base = tiny_base("llama") if model is None else wrap_model(model)
    engine = engine_with_heads(base, CandidateTree([(0,), (1,), (0, 0), (0, 1)]), num_heads=2)
    engine.check = replace(engine.check, rounding_tolerance=TOLERANCE)
    return engine


def make_oracle() -> Oracle:
    return Oracle(tiny_base("llama"))


def check(engine: Engine, sampling: SamplingParams | None = None) -> VerifyReport:
    return verify(engine, make_oracle(), PROMPTS, max_new_tokens=TOKENS, sampling=sampling)


def alter(
    monkeypatch: pytest.MonkeyPatch, prompt: list[int], change: Callable[[list[int]], list[int]]
) -> None:
    """Change the engine's drafted answer to one prompt."""
    original = Engine.generate

    def generate(self: Engine, asked: Any, **options: Any) -> GenerationResult:
        result = original(self, asked, **options)
        if asked == prompt and options["drafter"] != "none":
            result = replace(result, token_ids=change(list(result.token_ids)))
        return result

    monkeypatch.setattr(Engine, "generate", generate)


def plain_logits(prefix: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return tiny_model("llama")(torch.tensor([prefix])).logits[0, -1]


def plain_answer(prompt: list[int]) -> list[int]:
    """Greedy, token by token, by the model's own forward."""
    answer: list[int] = []
    while len(answer) < TOKENS and STOP not in answer:
        answer.append(int(plain_logits(prompt + answer).argmax()))
    return answer


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_a_sound_engine_is_identical(sampling: SamplingParams | None) -> None:
    report = check(make_engine(), sampling)
    assert report.differences == report.bugs == []
    assert (report.identical, report.num_prompts, report.rounding_tolerance) == (3, 3, TOLERANCE)
    if sampling is None:
        assert report.num_tokens == sum(len(plain_answer(prompt)) for prompt in PROMPTS)
    assert 1.0 <= report.acceptance_length <= 3.0


def test_the_acceptance_length_is_of_all_prompts_together() -> None:
    engine = make_engine()
    results = engine.generate(PROMPTS, max_new_tokens=TOKENS, batch_size=1)
    steps = sum(result.stats.num_steps for result in results)
    tokens = sum(len(result.token_ids) for result in results)
    assert check(engine).acceptance_length == (tokens - 3) / steps
    engine.use_tree(CandidateTree.root_only())
    assert check(engine).acceptance_length == 1.0


def test_the_oracle_answers_by_itself() -> None:
    for prompt in PROMPTS:
        assert make_oracle().generate(prompt, TOKENS)[0] == plain_answer(prompt)
        expected = plain_logits(prompt)
        torch.testing.assert_close(make_oracle().logits(prompt), expected, atol=1e-5, rtol=1e-4)


def test_the_oracle_stays_inside_the_context() -> None:
    answer, _ = make_oracle().generate([7] * 125, 10)
    assert 1 <= len(answer) <= 3


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_a_wrong_token_is_a_bug(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams | None
) -> None:
    engine = make_engine()
    options = {} if sampling is None else {"temperature": 0.8, "seed": 3}
    right = engine.generate(PROMPTS[1], max_new_tokens=TOKENS, drafter="none", **options).token_ids
    wrong = (right[2] + 1) % VOCAB
    alter(monkeypatch, PROMPTS[1], lambda ids: [*ids[:2], wrong, *ids[3:]])
    report = check(engine, sampling)
    (difference,) = report.bugs
    assert (difference.prompt, difference.position) == (1, 2)
    assert (difference.expected, difference.actual) == (right[2], wrong)
    if sampling is None:
        logits_V = plain_logits(PROMPTS[1] + right[:2])
        margin = float(logits_V[right[2]] - logits_V[wrong])
        assert difference.margin == pytest.approx(margin, abs=1e-4)
        assert difference.rounding_tolerance == TOLERANCE
    else:
        assert difference.rounding_tolerance == pytest.approx(TOLERANCE / 0.8)
    assert difference.margin > difference.rounding_tolerance
    assert report.identical == 2
    record = json.loads(json.dumps(report.to_json()))
    assert (record["bugs"], record["identical"], record["num_prompts"]) == (1, 2, 3)
    assert record["differences"][0]["position"] == 2


@pytest.mark.parametrize(
    ("change", "position"),
    [
        (lambda ids: ids[:-1], TOKENS - 1),
        (lambda ids: [*ids, 9], TOKENS),
        (lambda ids: [], 0),
    ],
)
def test_an_answer_of_another_length_is_a_bug(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int]], list[int]], position: int
) -> None:
    """Whatever the tolerance: rounding may choose another token but never ends an answer."""
    assert len(plain_answer(PROMPTS[0])) == TOKENS
    engine = make_engine()
    engine.check = replace(engine.check, rounding_tolerance=1e9)
    alter(monkeypatch, PROMPTS[0], change)
    (difference,) = check(engine).bugs
    assert (difference.prompt, difference.position) == (0, position)
    assert None in (difference.expected, difference.actual)


def twins(share: float) -> tuple[Any, int, int]:
    """(model, token, its twin): the first answer's first token, and one whose row of the output
    embedding is nearly the same, larger by `share`."""
    model = tiny_model("llama")
    token = plain_answer(PROMPTS[0])[0]
    assert plain_logits(PROMPTS[0])[token] > 0.1
    twin = VOCAB - 1
    assert token != twin
    model.lm_head.weight.data[twin] = model.lm_head.weight.data[token] * (1 + share)
    return model, token, twin


def test_a_near_tie_that_flips_is_rounding() -> None:
    """The engine's model prefers the twin by a millionth, the oracle's the token itself."""
    model, _, twin = twins(1e-6)
    other, token, _ = twins(-1e-6)
    report = verify(make_engine(model), Oracle(wrap_model(other)), PROMPTS[:1],
                    max_new_tokens=TOKENS)  # fmt: skip
    (difference,) = report.differences
    assert (difference.position, difference.expected, difference.actual) == (0, token, twin)
    assert 0 <= difference.margin < 1e-4
    assert difference.is_rounding
    assert report.bugs == []
    assert report.identical == 0


def test_a_wide_margin_that_flips_is_a_bug() -> None:
    model, _, twin = twins(0.1)
    other, token, _ = twins(-0.1)
    report = verify(make_engine(model), Oracle(wrap_model(other)), PROMPTS[:1],
                    max_new_tokens=TOKENS)  # fmt: skip
    (difference,) = report.bugs
    assert (difference.expected, difference.actual) == (token, twin)


def test_a_third_token_at_a_near_tie_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the two likeliest are close, only the second is excused, not a third token."""
    model, token, twin = twins(-1e-6)
    third = next(i for i in range(3, VOCAB) if i not in (token, twin))
    alter(monkeypatch, PROMPTS[0], lambda ids: [third, *ids[1:]])
    report = verify(make_engine(model), Oracle(wrap_model(model)), PROMPTS[:1],
                    max_new_tokens=TOKENS)  # fmt: skip
    (difference,) = report.bugs
    assert (difference.expected, difference.actual) == (token, third)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([5], [1, 2]) == 0
    assert first_difference([1], [1, 2]) == 1
    assert first_difference([1, 2], []) == 0
