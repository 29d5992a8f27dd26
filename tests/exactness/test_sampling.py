"""Sampling: the same seed gives the same text, and the text follows the exact distribution.

The first oracle samples by hand: a full forward of a second model for each token, every parameter
written out. The second is the exact probability of every short answer.

Shapes: V vocabulary, S sequences, A answers that can come.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from support.exact_distribution import (
    LEVEL,
    PROMPT,
    Rule,
    chi_square_p_value,
    exact_distribution,
    log_probabilities,
    power,
    right,
)
from support.partly_knowing import TREES, PartlyKnowing
from support.small_engines import (
    build_engine,
    decode_all,
    endless_base,
    engine_with_heads,
    random_heads,
    random_prompt,
)
from support.tiny_models import STOP, VOCAB, tiny_base, tiny_model

from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.engine.engine import Engine
from medusa_kit.heads import noise
from medusa_kit.heads.noise import gumbel_noise
from medusa_kit.infer.decode.accept import draws as draws_module
from medusa_kit.infer.decode.accept import sampler as sampler_module
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree

PENALISED = SamplingParams(
    1.1, top_p=0.95, seed=5, min_p=0.02, repetition_penalty=1.4, presence_penalty=0.5,
    frequency_penalty=0.3, logit_bias={7: 1.5, 11: -2.0},
)  # fmt: skip
SETTINGS = [
    SamplingParams(0.8, seed=1),
    SamplingParams(1.3, top_k=7, seed=2),
    SamplingParams(0.9, top_p=0.7, seed=3),
    SamplingParams(1.0, top_k=20, top_p=0.9, seed=4),
    PENALISED,
]


def sampled_by_hand(
    model: Any, prompt: list[int], tokens: int, params: SamplingParams, stop: int = STOP
) -> list[int]:
    answer: list[int] = []
    while len(answer) < tokens and stop not in answer:
        with torch.no_grad():
            logits_V = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, -1]
        noise_V = gumbel_noise(params.seed, len(prompt) + len(answer), torch.arange(len(logits_V)))
        answer.append(int((log_probabilities(logits_V, params, prompt, answer) + noise_V).argmax()))
    return answer


@pytest.mark.parametrize("params", SETTINGS, ids=["warm", "k", "p", "k and p", "penalised"])
def test_same_seed_same_text_for_every_tree(params: SamplingParams) -> None:
    engine = engine_with_heads()
    model = tiny_model("llama")
    settings = asdict(params)
    for length in (1, 14):
        prompt = random_prompt(length, length)
        expected = sampled_by_hand(model, prompt, 20, params)
        plain = engine.generate(prompt, max_new_tokens=20, drafter="none", **settings)
        assert plain.token_ids == expected
        for name, tree in TREES.items():
            engine.use_tree(tree)
            result = engine.generate(prompt, max_new_tokens=20, **settings)
            assert result.token_ids == expected, name


def test_same_seed_same_text_in_a_batch_with_deep_acceptance() -> None:
    """Rows of different length, settings and seed; random trees that hold much of the truth."""
    engine, model = build_engine(tiny_base("llama")), tiny_model("llama")
    prompts = [random_prompt(length, length) for length in (3, 17, 9, 6, 12)]
    truths = {
        tuple(prompt): sampled_by_hand(model, prompt, 24, params)
        for prompt, params in zip(prompts, SETTINGS, strict=True)
    }
    drafter = PartlyKnowing(truths)
    rows = decode_all(engine, drafter, prompts, 24, SETTINGS)
    assert [row.token_ids for row in rows] == list(truths.values())
    assert drafter.most_accepted >= 3


@pytest.fixture(scope="module")
def texts_by_hand() -> dict[tuple[int, int], list[int]]:
    """By the settings and the prompt's length, for all kinds of heads."""
    model = tiny_model("llama")
    return {
        (id(params), length): sampled_by_hand(model, random_prompt(length, length), 20, params)
        for params in (SETTINGS[1], PENALISED)
        for length in (4, 11)
    }


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_same_seed_same_text_for_every_kind_of_heads_alone_and_in_a_batch(
    texts_by_hand: dict[tuple[int, int], list[int]], kind: str
) -> None:
    engine = engine_with_heads(kind=kind)
    prompts = [random_prompt(length, length) for length in (4, 11)]
    for params in (SETTINGS[1], PENALISED):
        expected = [texts_by_hand[id(params), len(prompt)] for prompt in prompts]
        together = engine.generate(prompts, max_new_tokens=20, **asdict(params))
        assert [result.token_ids for result in together] == expected
        alone = [engine.generate(p, max_new_tokens=20, **asdict(params)) for p in prompts]
        assert [result.token_ids for result in alone] == expected


class Knowing(Drafter):
    """Drafts chains of three that hold the true continuation with a given probability a token."""

    name, num_nodes = "knowing", 4

    def __init__(self, truths: dict[tuple[int, ...], list[int]], share: float) -> None:
        self.truths, self.share = truths, share
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, state: State) -> Forest:
        chains = []
        for committed, root in zip(state.tokens, state.roots_B, strict=True):
            prompt = next(p for p in self.truths if tuple(committed[: len(p)]) == p)
            done = len(committed) - len(prompt) + 1
            ahead = [*self.truths[prompt][done : done + 3], 0, 0, 0][:3]
            right = (torch.rand(3, generator=self.generator) < self.share).tolist()
            pairs = zip(ahead, right, strict=True)
            chains.append([root, *(t if ok else (t + 1) % VOCAB for t, ok in pairs)])
        return Forest.chains(chains, torch.device("cpu"))


def test_drafters_that_are_right_always_never_and_sometimes() -> None:
    """The text is the same; right drafts are accepted to full depth, wrong ones cost a step each,
    and logits are processed at the nodes of the walk only."""
    model, base = endless_base(VOCAB).model, endless_base(VOCAB)
    engine, tokens = build_engine(base), 25
    settings = [replace(PENALISED, seed=8), SETTINGS[0]]
    prompts = [random_prompt(length, length) for length in (5, 8)]
    truths = {
        tuple(prompt): sampled_by_hand(model, prompt, tokens, params, stop=-1)
        for prompt, params in zip(prompts, settings, strict=True)
    }
    steps = {}
    for share in (1.0, 0.5, 0.0):
        rows = decode_all(engine, Knowing(truths, share), prompts, tokens, settings)
        assert [row.token_ids for row in rows] == list(truths.values()), share
        steps[share] = [row.num_steps for row in rows]
        if share == 1.0:
            assert all(row.depth_counts == {3: 6} for row in rows)
        if share == 0.0:
            assert all(row.depth_counts == {0: tokens - 1} for row in rows)
    assert steps[1.0] == [6, 6]
    assert steps[0.0] == [24, 24]
    assert all(6 < count < 24 for count in steps[0.5])


def test_only_nodes_of_the_walk_are_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw for the prompt, then one for each token: none for a node beside the path."""
    seen: list[int] = []
    choose, drawn_at = Sampler.choose, Sampler.drawn_at

    def chosen(self: Sampler, logits_V: torch.Tensor, prefix: list[int]) -> int:
        if not self.draws_by_position(logits_V):
            seen.append(len(prefix))
        return choose(self, logits_V, prefix)

    def drawn(self: Sampler, scores_V: torch.Tensor, position: int) -> int:
        seen.append(position)
        return drawn_at(self, scores_V, position)

    monkeypatch.setattr(Sampler, "choose", chosen)
    monkeypatch.setattr(Sampler, "drawn_at", drawn)
    engine = engine_with_heads(endless_base(8))
    result = engine.generate([5, 3, 7], max_new_tokens=24, **asdict(SETTINGS[0]))
    assert result.stats.acceptance_length > 1.1
    # Each position once; the last step may draw past the token limit.
    assert seen == list(range(3, 3 + len(seen)))
    assert 24 <= len(seen) <= 24 + engine.tree.depth


def test_other_seeds_give_other_texts() -> None:
    engine = engine_with_heads()
    prompt = random_prompt(5, 0)
    texts = {
        tuple(engine.generate(prompt, max_new_tokens=12, temperature=1.0, seed=seed).token_ids)
        for seed in range(8)
    }
    assert len(texts) == 8


# The distribution. Answers of three or four tokens are drawn through tree decoding with many seeds
# and counted against their exact probabilities with a chi-square test over all answers that can
# come, so each token's distribution and the dependence between tokens are tested at once.
# Power: `power` draws from the exact distribution of a *wrong* rule, often, and counts how often
# the test rejects it. WRONG_RULES says what it detects. The mildest are half the frequency penalty,
# with a non-centrality of 100 at 73 degrees of freedom, and a min-p left out, by which 4% of
# answers are such as cannot come; a temperature 10% off would be found in 6 of 10 trials only. Two
# wrong rules are decoded with.
# A right sampler falls below 1e-3 for one choice of seeds in a thousand; seeds are fixed, so it
# passes always or never.


@dataclass(frozen=True)
class Case:
    params: SamplingParams
    tokens: int
    draws: int = 2048


BATCH = 64
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.8,
             "logit_bias": {2: 1.0}}  # fmt: skip
NARROW = Case(SamplingParams(0.7, top_k=4), 3)
SMOOTH = Case(SamplingParams(0.7, **PENALTIES), 3)
EVERYTHING = Case(SamplingParams(0.9, top_k=6, top_p=0.92, min_p=0.1, **PENALTIES), 4, draws=1024)
CASES = {"narrow": NARROW, "smooth": SMOOTH, "everything": EVERYTHING}
FULL_TREE = CandidateTree(
    [*[(a,) for a in range(4)], *[(a, b) for a in range(4) for b in range(3)]]
)


@pytest.fixture(scope="module")
def few_tokens() -> Engine:
    """Eight tokens and heads at random: some drafts hold, most do not."""
    base = endless_base(8)
    return build_engine(base, heads=random_heads(base, num_heads=2), tree=FULL_TREE)


def draws(engine: Engine, case: Case) -> tuple[torch.Tensor, float]:
    """(answers [draws, tokens], mean accepted depth)."""
    assert engine.heads is not None
    answers, accepted, steps = [], 0, 0
    for start in range(0, case.draws, BATCH):
        settings = [replace(case.params, seed=seed) for seed in range(start, start + BATCH)]
        drafter = draft_with(engine.heads, engine.tree)
        for row in decode_all(engine, drafter, [PROMPT] * BATCH, case.tokens, settings):
            answers.append(row.token_ids)
            accepted += sum(depth * count for depth, count in row.depth_counts.items())
            steps += row.num_steps
    return torch.tensor(answers), accepted / steps


@pytest.mark.parametrize("name", CASES)
def test_sampled_answers_follow_the_exact_distribution(few_tokens: Engine, name: str) -> None:
    case = CASES[name]
    distribution = exact_distribution(right(case.params), case.tokens)
    assert len(distribution) >= 64
    answers_ST, accepted = draws(few_tokens, case)
    assert accepted > 0.3, "the test needs drafts that are accepted"
    assert chi_square_p_value(answers_ST, distribution) > LEVEL


def temperature_first(params: SamplingParams) -> Rule:
    """Penalties and bias taken from logits that are scaled already."""
    rest = right(replace(params, temperature=1.0))
    return lambda logits_V, answer: rest(logits_V / params.temperature, answer)


def prompt_counted(params: SamplingParams) -> Rule:
    """Presence and frequency over the prompt too."""
    return lambda logits_V, answer: log_probabilities(logits_V, params, [], [*PROMPT, *answer])


def last_token_left_out(params: SamplingParams) -> Rule:
    """Penalties by the parent's prefix instead of the node's own."""
    return lambda logits_V, answer: right(params)(logits_V, answer[:-1])


def changed(case: Case, **changes: Any) -> Rule:
    return right(replace(case.params, **changes))


WRONG_RULES: dict[str, tuple[Case, Rule]] = {
    "temperature 20% up": (NARROW, changed(NARROW, temperature=0.84)),
    "temperature 20% down": (SMOOTH, changed(SMOOTH, temperature=0.56)),
    "no repetition penalty": (SMOOTH, changed(SMOOTH, repetition_penalty=None)),
    "no presence penalty": (SMOOTH, changed(SMOOTH, presence_penalty=0.0)),
    "half the frequency penalty": (SMOOTH, changed(SMOOTH, frequency_penalty=0.4)),
    "half the bias": (SMOOTH, changed(SMOOTH, logit_bias={2: 0.5})),
    "counts over the prompt too": (SMOOTH, prompt_counted(SMOOTH.params)),
    "the last token left out": (SMOOTH, last_token_left_out(SMOOTH.params)),
    "no top-k": (EVERYTHING, changed(EVERYTHING, top_k=None)),
    "no top-p": (EVERYTHING, changed(EVERYTHING, top_p=None)),
    "no min-p": (EVERYTHING, changed(EVERYTHING, min_p=None)),
    "temperature first": (EVERYTHING, temperature_first(EVERYTHING.params)),
}


def test_the_distribution_test_has_the_power_to_reject_wrong_rules() -> None:
    distributions = {
        name: exact_distribution(right(case.params), case.tokens) for name, case in CASES.items()
    }
    right_one = distributions["narrow"]
    assert power(NARROW.draws, right_one, right_one, 200) < 0.03
    for name, (case, rule) in WRONG_RULES.items():
        distribution = next(distributions[key] for key, one in CASES.items() if one is case)
        wrong = exact_distribution(rule, case.tokens)
        assert power(case.draws, distribution, wrong, 20) == 1.0, name


def test_the_distribution_test_rejects_a_rule_that_is_blind_to_the_last_token(
    few_tokens: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sampler_module._processed_by
    monkeypatch.setattr(
        sampler_module,
        "_processed_by",
        lambda processors, logits_V, prefix: original(
            processors, logits_V, prefix[: max(4, len(prefix) - 1)]
        ),
    )
    answers_ST, _ = draws(few_tokens, replace(SMOOTH, draws=1024))
    assert chi_square_p_value(answers_ST, exact_distribution(right(SMOOTH.params), 3)) < 1e-6


def test_the_distribution_test_rejects_noise_shared_between_positions(
    few_tokens: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token alone then still follows its distribution; only their joint distribution is
    wrong."""
    original = noise.mixed
    for module in (noise, draws_module):
        monkeypatch.setattr(module, "mixed", lambda seed, _: original(seed, 0))
    answers_ST, _ = draws(few_tokens, NARROW)
    assert chi_square_p_value(answers_ST, exact_distribution(right(NARROW.params), 3)) < 1e-6


def test_the_chi_square_helper_against_known_values() -> None:
    """Two equal shares: the p-value of a deviation d is 2 (1 - Phi(d)) in standard deviations."""
    distribution = {(0,): 0.5, (1,): 0.5}
    num_draws = 10_000  # a standard deviation is 50
    for deviations, expected in ((0, 1.0), (1, 0.31731), (3, 0.0027)):
        more = num_draws // 2 + 50 * deviations
        answers_ST = torch.tensor([[1]] * more + [[0]] * (num_draws - more))
        assert chi_square_p_value(answers_ST, distribution) == pytest.approx(expected, abs=1e-4)
