"""Draws by the C++ kernels: the very tokens that transformers' processors and the noise give."""

import math
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_base
from transformers import (
    EpsilonLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_kit.base.model import BaseModel
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.decode.accept.draws import Warping, split_warpers
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.settings.sampling import SamplingOptions, SamplingParams

NARROWING: list[SamplingOptions] = [
    {}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_p": 0.999}, {"top_k": 1}, {"top_k": 50},
    {"top_k": 50, "top_p": 0.9}, {"top_k": 5000, "top_p": 0.95, "min_p": 0.01}, {"min_p": 0.05},
    {"top_p": 0.95, "min_p": 1e-4}, {"min_p": 1.0},
]  # fmt: skip
SIZES = (1, 2, 16, 63, 65, 1000, 49_152)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if kernels.load_library() is None:
        pytest.skip("the C++ kernels are not available")


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return tiny_base("llama")


def both(sampler: Sampler, logits_V: torch.Tensor, prefix: list[int]) -> tuple[int, int]:
    """(by the kernels, by torch)."""
    return sampler.choose(logits_V, prefix), int(sampler.scores(logits_V, prefix).argmax())


@pytest.mark.parametrize("narrowing", NARROWING, ids=str)
def test_the_kernels_draw_what_torch_draws(base: BaseModel, narrowing: SamplingOptions) -> None:
    found = []
    for size in SIZES:
        for spread, temperature in ((0.01, 1.0), (1, 0.3), (3, 2.5), (10, 0.7)):
            logits_V = spread * torch.randn(size)
            if spread == 3 and size > 2:
                logits_V[torch.rand(size) < 0.5] = -math.inf
            params = SamplingParams(temperature, seed=size, **narrowing)
            sampler = Sampler(base, params, [1], 9)
            found += [both(sampler, logits_V, [1] * length) for length in range(1, 5)]
    assert [ours for ours, _ in found] == [torchs for _, torchs in found]
    assert len({token for token, _ in found}) > 3


@pytest.mark.parametrize("narrowing", NARROWING, ids=str)
def test_no_call_into_torch_where_the_kernels_draw(
    base: BaseModel, narrowing: SamplingOptions
) -> None:
    class Scoreless(Sampler):
        def scores(self, *_: Any) -> torch.Tensor:
            raise AssertionError("scores of all tokens")

    sampler = Scoreless(base, SamplingParams(0.7, **narrowing), [1], 9)
    assert 0 <= sampler.choose(torch.randn(100), [1]) < 100


def test_one_possible_token_is_drawn_whatever_the_noise(base: BaseModel) -> None:
    for narrowing in NARROWING:
        logits_V = torch.full((500,), -math.inf)
        logits_V[321] = -5.0
        sampler = Sampler(base, SamplingParams(2.0, **narrowing), [1], 9)
        assert sampler.choose(logits_V, [1]) == 321


def test_processors_before_the_warpers_run_first(base: BaseModel) -> None:
    """A penalty on a token of the prefix, and a bias that decides."""
    params = SamplingParams(0.8, top_p=0.9, repetition_penalty=1.3, logit_bias={7: 50.0})
    sampler = Sampler(base, params, [1], 9)
    logits_V = torch.randn(60)
    assert both(sampler, logits_V, [1, 2, 3]) == (7, 7)
    params = SamplingParams(0.8, repetition_penalty=1.9)
    sampler = Sampler(base, params, [1], 9)
    for length in range(1, 40):
        ours, torchs = both(sampler, 3 * logits_V, list(range(length)))
        assert ours == torchs


def test_a_top_k_that_no_integer_of_c_holds_keeps_every_token(base: BaseModel) -> None:
    for top_k in (2**31, 2**63, 2**64 - 1, 2**64 + 5):
        sampler = Sampler(base, SamplingParams(1.5, top_k=top_k, seed=3), [1], 9)
        plain = Sampler(base, SamplingParams(1.5, seed=3), [1], 9)
        for size in (3, 70):
            logits_V = torch.randn(size)
            assert sampler.choose(logits_V, [1]) == plain.choose(logits_V, [1])


@pytest.mark.parametrize("temperature", [1e-20, 1e-7, 1e-6, 1e-5, 1e-3])
def test_equal_sums_go_to_the_lower_token(base: BaseModel, temperature: float) -> None:
    """Scores are so large that most noise is lost in rounding."""
    for size in (2, 64, 300):
        logits_V = torch.full((size,), 20.0)
        for seed in range(40):
            sampler = Sampler(base, SamplingParams(temperature, seed=seed), [1], 9)
            ours, torchs = both(sampler, logits_V, [1])
            assert ours == torchs


def test_other_dtypes_and_strides_give_the_same_token(base: BaseModel) -> None:
    sampler = Sampler(base, SamplingParams(0.7, top_p=0.8), [1], 9)
    logits_VX = torch.randn(300, 2)
    for logits_V in (logits_VX[:, 1], logits_VX[:, 0].double(), logits_VX[:, 0].bfloat16()):
        ours, torchs = both(sampler, logits_V, [1])
        assert ours == torchs


@pytest.mark.parametrize(
    ("processors", "warping"),
    [
        ([], Warping()),
        ([TemperatureLogitsWarper(0.7)], Warping(0.7)),
        (
            [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8)],
            Warping(0.7, 9, 0.8),
        ),
        ([TopKLogitsWarper(9), MinPLogitsWarper(0.1)], Warping(1.0, 9, 1.0, 0.1)),
        ([TopPLogitsWarper(0.8), TemperatureLogitsWarper(0.7)], None),
        ([TopKLogitsWarper(9), TopKLogitsWarper(3)], None),
        ([TopPLogitsWarper(0.8, min_tokens_to_keep=2)], None),
        ([TopKLogitsWarper(9, filter_value=-100.0)], None),
        ([TemperatureLogitsWarper(0.7), EpsilonLogitsWarper(0.01)], Warping()),
    ],
)
def test_what_the_kernels_are_asked_for(processors: list[Any], warping: Warping | None) -> None:
    """A warper that they do not know is run by torch, with all before it."""
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    before, found = split_warpers([penalty, *processors])
    assert found == warping
    warps = isinstance(processors[-1], EpsilonLogitsWarper) if processors else False
    assert list(before) == [penalty, *(processors if warping is None or warps else [])]
