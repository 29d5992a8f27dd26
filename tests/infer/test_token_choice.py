"""Choosing a token: transformers' own processing, noise by position, values out of range."""

import pytest
import torch
from tiny_models import VOCAB, tiny_model
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from medusa_kit.errors import ConfigError
from medusa_kit.infer.sampling import SamplingParams, TokenChooser, gumbel_noise


def processed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    ids, scores = torch.zeros(1, 1, dtype=torch.int64), logits[None]
    for warper in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k),
                   TopPLogitsWarper(top_p)):  # fmt: skip
        scores = warper(ids, scores)
    return scores[0].softmax(-1)


def test_draws_follow_the_processed_distribution() -> None:
    """Chi-square over 20,000 seeds; power 0.99 against a total variation of 0.03 and more."""
    logits = 2 * torch.randn(VOCAB)
    model = tiny_model("llama")
    expected = processed(logits, 0.8, 12, 0.9)
    counts = torch.zeros(VOCAB)
    draws = 20_000
    for seed in range(draws):
        noise = gumbel_noise(seed, 7, VOCAB)
        if seed < 200:  # the chooser draws by this very noise
            chooser = TokenChooser(model, SamplingParams(0.8, 12, 0.9, seed), 3)
            token = chooser.choose(logits, [1] * 7)
            assert token == int((expected.log() + noise).argmax())
        counts[int((expected.log() + noise).argmax())] += 1
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert 3 < int(kept.sum()) <= 12
    wanted = expected[kept].double() * draws
    chi_square = ((counts[kept] - wanted) ** 2 / wanted).sum()
    half_freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(half_freedom, chi_square / 2) > 1e-4


def test_noise_depends_on_seed_and_position_and_nothing_else() -> None:
    first = gumbel_noise(3, 11, 64)
    torch.manual_seed(99)
    assert torch.equal(first, gumbel_noise(3, 11, 64))
    others = [gumbel_noise(seed, position, 64) for seed in range(6) for position in range(6, 12)]
    flat = torch.stack(others)
    correlation = torch.corrcoef(flat) - torch.eye(len(others))
    assert correlation.abs().max() < 0.6  # 64 numbers each; equal streams would give 1


def test_penalties_of_the_generation_config_see_the_nodes_own_prefix() -> None:
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 5.0
    chooser = TokenChooser(model, SamplingParams(), 2)
    logits = torch.full((VOCAB,), 0.1)
    logits[5], logits[6] = 2.0, 1.0
    assert not chooser.takes_argmax
    assert chooser.choose(logits, [1, 3]) == 5
    assert chooser.choose(logits, [1, 5]) == 6


def test_plain_greedy_is_the_argmax() -> None:
    chooser = TokenChooser(tiny_model("llama"), SamplingParams(), 2)
    logits = torch.randn(VOCAB)
    assert chooser.takes_argmax
    assert chooser.choose(logits, [1, 3]) == int(logits.argmax())


@pytest.mark.parametrize(
    "values",
    [(-0.1,), (float("nan"),), (float("inf"),), (0.7, 0), (0.7, None, 0.0), (0.7, None, 1.01),
     (0.0, 5), (0.0, None, 0.9)],
)  # fmt: skip
def test_values_out_of_range_are_refused(values: tuple) -> None:
    with pytest.raises(ConfigError, match=r"out of range|no meaning"):
        SamplingParams(*values)
