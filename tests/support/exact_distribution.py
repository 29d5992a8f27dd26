"""The exact probabilities of short answers, and a test of counts against them.

Shapes: V vocabulary, S sequences, A answers that can come.
"""

import math
from collections import Counter
from collections.abc import Callable

import torch

from medusa_kit.settings.sampling import SamplingParams
from support.small_engines import (
    endless_base,
)


def log_probabilities(
    logits_V: torch.Tensor, params: SamplingParams, prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """What the parameters mean, written out: penalties, bias, temperature, the k best, the nucleus,
    the share of the likeliest."""
    logits_V = logits_V.double().clone()
    for token in {*prompt, *answer}:
        penalty = params.repetition_penalty or 1.0
        logits_V[token] *= penalty if logits_V[token] < 0 else 1 / penalty
    for token, count in Counter(answer).items():
        logits_V[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in (params.logit_bias or {}).items():
        logits_V[token] += bias
    logits_V /= params.temperature
    order_V = logits_V.argsort(descending=True, stable=True)
    kept = len(order_V) if params.top_k is None else params.top_k
    shares_V = logits_V[order_V[:kept]].softmax(-1)
    if params.top_p is not None:
        before_V = shares_V.cumsum(-1) - shares_V
        kept = int((before_V < params.top_p).sum())
    if params.min_p is not None:
        kept = min(kept, int((shares_V >= params.min_p * shares_V[0]).sum()))
    result_V = torch.full_like(logits_V, float("-inf"))
    result_V[order_V[:kept]] = logits_V[order_V[:kept]].log_softmax(-1)
    return result_V


PROMPT = [5, 3, 7, 4]
LEVEL = 1e-3  # of the chi-square tests


Distribution = dict[tuple[int, ...], float]


Rule = Callable[[torch.Tensor, list[int]], torch.Tensor]  # (logits_V, answer) -> log p_V


def right(params: SamplingParams) -> Rule:
    return lambda logits_V, answer: log_probabilities(logits_V, params, PROMPT, answer)


def exact_distribution(rule: Rule, tokens: int) -> Distribution:
    """Probability of every answer that can come, from plain forwards of a second model."""
    model = endless_base(8).model
    answers: Distribution = {(): 1.0}
    for _ in range(tokens):
        longer: Distribution = {}
        prefixes = torch.tensor([[*PROMPT, *answer] for answer in answers])
        with torch.no_grad():
            logits_AV = model(prefixes, use_cache=False).logits[:, -1]
        for (answer, share), logits_V in zip(answers.items(), logits_AV, strict=True):
            for token, log in enumerate(rule(logits_V, list(answer)).tolist()):
                if log > -math.inf:
                    longer[(*answer, token)] = share * math.exp(log)
        answers = longer
    assert abs(sum(answers.values()) - 1) < 1e-6
    return answers


def chi_square_p_value(answers_ST: torch.Tensor, distribution: Distribution) -> float:
    """p-value of the counts under `distribution`; answers expected fewer than 5 times share a bin.

    0 where an answer came that cannot come.
    """
    seen = Counter(map(tuple, answers_ST.tolist()))
    if not seen.keys() <= distribution.keys():
        return 0.0
    counts = [(seen[a], len(answers_ST) * share) for a, share in distribution.items()]
    bins = [(count, expected) for count, expected in counts if expected >= 5]
    rare = [(count, expected) for count, expected in counts if expected < 5]
    if rare:
        bins.append((sum(count for count, _ in rare), sum(share for _, share in rare)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in bins)
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def power(num_draws: int, distribution: Distribution, wrong: Distribution, trials: int) -> float:
    """Share of trials in which answers drawn by `wrong` are rejected as answers by
    `distribution`."""
    generator = torch.Generator().manual_seed(0)
    shares_A = torch.tensor(list(wrong.values()), dtype=torch.float64)
    answers_AT = torch.tensor(list(wrong))
    rejected = 0
    for _ in range(trials):
        drawn_S = shares_A.multinomial(num_draws, replacement=True, generator=generator)
        rejected += chi_square_p_value(answers_AT[drawn_S], distribution) < LEVEL
    return rejected / trials
