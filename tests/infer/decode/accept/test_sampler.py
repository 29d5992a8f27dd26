"""Choosing a token: transformers' own processing, noise by position, values out of range."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import VOCAB, tiny_base
from transformers import (
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_kit.errors import ConfigError
from medusa_kit.heads.noise import gumbel_noise, mixed
from medusa_kit.infer.decode.accept.logits_processing import logits_processors
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.settings.sampling import SamplingOptions, SamplingParams

# Of seed 3 and position 11, for tokens 0, 1 and 150,000: by Python's own integers.
KNOWN_NOISE = [-0.5374844, 0.4486400, -0.0496020]


def processed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    ids, scores = torch.zeros(1, 1, dtype=torch.int64), logits[None]
    for warper in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k),
                   TopPLogitsWarper(top_p)):  # fmt: skip
        scores = warper(ids, scores)
    return scores[0].softmax(-1)


def test_draws_follow_the_processed_distribution() -> None:
    """Chi-square over 10,000 seeds; power 0.99 against a total variation of 0.045 and more."""
    logits = 2 * torch.randn(VOCAB)
    base = tiny_base("llama")
    expected = processed(logits, 0.8, 12, 0.9)
    draws, tokens = 10_000, torch.arange(VOCAB)
    noise_SV = torch.stack([gumbel_noise(seed, 7, tokens) for seed in range(draws)])
    drawn_S = (expected.log() + noise_SV).argmax(-1)
    for seed in range(200):  # the sampler draws by this very noise
        sampler = Sampler(base, SamplingParams(0.8, 12, 0.9, seed), [1] * 3, 9)
        assert sampler.choose(logits, [1] * 7) == drawn_S[seed]
    counts = drawn_S.bincount(minlength=VOCAB)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert 3 < int(kept.sum()) <= 12
    wanted = expected[kept].double() * draws
    chi_square = ((counts[kept] - wanted) ** 2 / wanted).sum()
    half_freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(half_freedom, chi_square / 2) > 1e-4


def test_noise_depends_on_seed_position_and_token_and_nothing_else() -> None:
    tokens = torch.arange(64)
    first = gumbel_noise(3, 11, tokens)
    torch.manual_seed(99)
    assert torch.equal(first, gumbel_noise(3, 11, tokens))
    some = torch.tensor([40, 2, 40])
    assert torch.equal(first[some], gumbel_noise(3, 11, some))
    places = [(seed, position) for seed in range(6) for position in range(6, 12)]
    others = [gumbel_noise(*place, tokens) for place in places]
    flat = torch.stack(others)
    correlation = torch.corrcoef(flat) - torch.eye(len(others))
    assert correlation.abs().max() < 0.6  # 64 numbers each; equal streams would give 1


def test_noise_is_gumbel_noise_and_the_same_on_every_machine() -> None:
    """Kolmogorov-Smirnov over 100,000 tokens: the largest gap to exp(-exp(-x)) is 0.0051 at 1%."""
    noise = gumbel_noise(-5, 1 << 40, torch.arange(100_000)).double().sort().values
    expected = torch.exp(-torch.exp(-noise))
    assert (expected - torch.linspace(0, 1, len(noise))).abs().max() < 0.0051
    known = torch.tensor(KNOWN_NOISE)
    assert torch.allclose(gumbel_noise(3, 11, torch.tensor([0, 1, 150_000])), known, atol=1e-6)


def test_penalties_of_the_generation_config_see_the_nodes_own_prefix() -> None:
    base = tiny_base("llama")
    base.generation_config.repetition_penalty = 5.0
    sampler = Sampler(base, SamplingParams(), [1, 3], 9)
    logits = torch.full((VOCAB,), 0.1)
    logits[5], logits[6] = 2.0, 1.0
    assert not sampler.takes_argmax
    assert sampler.choose(logits, [1, 3]) == 5
    assert sampler.choose(logits, [1, 5]) == 6


def test_drafters_are_told_of_draws_that_numbers_describe() -> None:
    base, drawn = tiny_base("llama"), SamplingParams(temperature=0.8, seed=4)
    draws = Sampler(base, drawn, [1, 3], 9).draws_after(7)
    assert draws is not None
    assert (draws.temperature, draws.noise_seed(0)) == (0.8, mixed(4, 8))
    assert Sampler(base, SamplingParams(), [1, 3], 9).draws_after(7) is None
    unusual = [TopKLogitsWarper(5), TemperatureLogitsWarper(0.8)]  # in the other order
    assert Sampler(base, drawn, [1, 3], 9, processors=unusual).draws_after(7) is None


def test_plain_greedy_is_the_argmax() -> None:
    sampler = Sampler(tiny_base("llama"), SamplingParams(), [1, 3], 9)
    logits = torch.randn(VOCAB)
    assert sampler.takes_argmax
    assert sampler.choose(logits, [1, 3]) == int(logits.argmax())


PROMPT, ANSWER = [3, 4, 4], [4, 5, 5]


@pytest.mark.parametrize(
    ("options", "gain"),
    [
        ({"presence_penalty": 0.5}, {4: -0.5, 5: -0.5}),
        ({"frequency_penalty": -0.25}, {4: 0.25, 5: 0.5}),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, {4: -1.5, 5: -2.0}),
        ({"logit_bias": {3: 1.5, 90: -7}}, {3: 1.5, 90: -7.0}),
        ({"presence_penalty": 1.0, "logit_bias": {5: 3}}, {4: -1.0, 5: 2.0}),
    ],
)
def test_penalties_and_bias_by_hand(options: SamplingOptions, gain: dict[int, float]) -> None:
    """OpenAI's formula over the answer alone; what stands in the prompt is free."""
    sampler = Sampler(tiny_base("llama"), SamplingParams.of(options), PROMPT, 9)
    logits = torch.randn(VOCAB)
    wanted = logits.clone()
    for token, value in gain.items():
        wanted[token] += value
    assert torch.allclose(sampler.scores(logits, [*PROMPT, *ANSWER]), wanted)


def test_a_bases_own_repetition_penalty_holds_until_another_is_given() -> None:
    base = tiny_base("llama")
    base.generation_config.repetition_penalty = 2.0
    base.generation_config.min_p = 0.9  # narrowing is the request's alone, as with top-k and top-p
    logits = torch.ones(VOCAB)
    for given, expected in ((None, 0.5), (4.0, 0.25), (1.0, 1.0)):
        sampler = Sampler(base, SamplingParams(repetition_penalty=given), [7], 9)
        assert sampler.scores(logits, [7])[7] == expected
        assert sampler.takes_argmax == (given == 1.0)
    warm = Sampler(base, SamplingParams(1.0), [7], 9)
    assert warm.scores(torch.randn(VOCAB), [7]).isfinite().all()


def test_typical_judgement_by_hand() -> None:
    """p = 1/2, 1/4, 1/8, 1/8: entropy 1.75 log 2, so exp(-entropy) = 0.297."""
    logits = torch.full((VOCAB,), float("-inf"))
    logits[10:14] = torch.tensor([0.5, 0.25, 0.125, 0.125]).log() * 2  # temperature 2 halves it
    for options, passing in [
        ({}, [10, 11, 12, 13]),  # min(0.09, 0.3 * 0.297) = 0.089
        ({"epsilon": 0.5, "delta": 0.5}, [10, 11]),  # 0.149
        ({"epsilon": 0.126, "delta": 1.0}, [10, 11]),  # 0.126
        ({"epsilon": 1.0}, [10]),  # delta 1: 0.297
    ]:
        params = SamplingParams(2.0, acceptance="typical", **options)
        verdict = Sampler(tiny_base("llama"), params, [1], 9).judge(logits, [1], range(9, 15))
        assert verdict.top_token == 10
        assert list(verdict.passing(range(9, 15))) == passing, options


def test_options_are_the_fields_of_the_parameters() -> None:
    assert list(SamplingOptions.__annotations__) == list(SamplingParams.__dataclass_fields__)
    with pytest.raises(ConfigError, match=r"(?s)option 'top_q' is unknown.*did you mean top_p\?"):
        SamplingParams.of({"top_q": 0.9})


TYPICAL = {"temperature": 0.7, "acceptance": "typical"}


def test_numbers_of_other_libraries_are_plain_ones() -> None:
    params = SamplingParams(
        np.float32(0.5), top_k=np.int64(7), top_p=Fraction(9, 10), seed=np.int64(-5)
    )  # type: ignore[arg-type]
    assert params == SamplingParams(0.5, 7, 0.9, -5)
    assert type(params.seed) is type(params.top_k) is int
    assert type(SamplingParams(2).temperature) is type(params.top_p) is float
    base = tiny_base("llama")
    for one in (params, SamplingParams(2)):
        sampler = Sampler(base, one, [1], 9)
        assert 0 <= sampler.choose(torch.randn(VOCAB), [1]) < VOCAB


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
     ("temperature", None), ("temperature", "hot"), ("top_k", 0), ("top_k", 1.5), ("top_p", 0.0),
     ("top_p", 1.01), ("seed", 0.5), ("min_p", -0.01), ("min_p", 1.01), ("repetition_penalty", 0.0),
     ("repetition_penalty", float("inf")), ("presence_penalty", 2.01), ("presence_penalty", None),
     ("frequency_penalty", -2.01), ("frequency_penalty", float("nan")), ("epsilon", 0.0),
     ("epsilon", 1.01), ("delta", 0.0), ("delta", 1.01)],
)  # fmt: skip
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams.of({**TYPICAL, name: value})
    assert f"{name} {value!r} is out of range; expected " in error.value.message
    assert error.value.hint


@pytest.mark.parametrize(
    ("bias", "message"),
    [({-1: 0.0}, "token id -1 is out of range"), ({"5": 0.0}, "token id '5' is out of range"),
     ({5: 101}, "of token 5 101 is out of range; expected -100 to 100"),
     ({5: float("nan")}, "of token 5 nan"), ({VOCAB: 0.0}, r"id 96; expected 0\.\.95"),
     ([1], "is of type list; expected a mapping"), (True, "is of type bool")],
)  # fmt: skip
def test_a_bias_that_cannot_be_is_refused(bias: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampler(tiny_base("llama"), SamplingParams(logit_bias=bias), [1], 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"top_k": 5}, "top_k has no meaning when decoding greedily"),
     ({"top_p": 0.9, "min_p": 0.1}, "top_p and min_p has no meaning"),
     ({"acceptance": "typical"}, "typical acceptance has no meaning at temperature 0"),
     ({"temperature": 0.7, "epsilon": 0.1}, "no meaning with exact acceptance"),
     ({"temperature": 0.7, "delta": 0.1}, "no meaning with exact acceptance"),
     ({"temperature": 0.7, "acceptance": "typcal"}, r"(?s)'typcal' is unknown.*mean typical\?")],
)  # fmt: skip
def test_options_without_a_meaning_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams.of(options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 2.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"repetition_penalty": 1, "logit_bias": {3: 1.0}},
        {"temperature": 0.5, "top_p": 1.0, "frequency_penalty": 0.1},
    ],
)
def test_usual_processors_are_those_that_transformers_makes(
    options: SamplingOptions,
) -> None:
    base, other, params = tiny_base("llama"), tiny_base("llama"), SamplingParams.of(options)
    ours = list(logits_processors(base, params, PROMPT, 9))
    other.model.generation_config.no_repeat_ngram_size = (
        90  # which is not usual, so theirs are made
    )
    made = list(logits_processors(other, params, PROMPT, 9))
    theirs = [one for one in made if not isinstance(one, NoRepeatNGramLogitsProcessor)]
    assert len(theirs) == len(made) - 1
    assert [type(one) for one in ours] == [type(one) for one in theirs]
    logits_1V, prefix_1T = torch.randn(1, VOCAB), torch.tensor([[*PROMPT, *ANSWER]])
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one(prefix_1T, logits_1V.clone()), other(prefix_1T, logits_1V.clone()))
