"""A draft model's draws: multi-candidate rejection keeps the base model's distribution.

The same test of the distribution as test_sampling's, with a draft of other weights whose length
depends on what it drew. Rules that are wrong in one place only are decoded with too, and rejected.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.exact_distribution import PROMPT, chi_square_p_value, exact_distribution, right
from support.small_engines import build_engine, decode_all, endless_base

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.accept import token_choice
from medusa_kit.infer.accept.rules import accept_drawn
from medusa_kit.infer.draft import Draft, State
from medusa_kit.settings.sampling import SamplingParams

# Of the wrong rules below each is told from 1,024 answers at 1e-4. What the test of 1,536 cannot
# tell: a rule that accepts a fifth more than it should (p = 2e-3 over answers of three tokens).
BATCH, LEVEL, TOKENS, DRAWS = 64, 1e-3, 3, 1536
WARM = SamplingParams(1.0)
NARROW = SamplingParams(0.8, top_k=5, presence_penalty=0.5, logit_bias={2: 0.7})
CHAIN = {"sampling": "rejection", "threshold": 0.2, "width": 1}
TREE = {"sampling": "rejection", "threshold": 0.2, "width": 3, "num_nodes": 6}


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = build_engine(endless_base(8))
    engine.draft_model = endless_base(8, seed=1)
    return engine


def drawn_answers(
    engine: Engine,
    params: SamplingParams,
    options: dict[str, Any],
    draws: int,
    tokens: int = TOKENS,
) -> tuple[torch.Tensor, float]:
    """(answers [draws, tokens], mean accepted depth)."""
    answers, accepted, steps = [], 0, 0
    for start in range(0, draws, BATCH):
        context = DraftContext(
            engine.verifier, draft_model=engine.draft_model, sampling=params, memory=engine.memory
        )
        drafter = build_drafter("draft-model", context, options)
        settings = [replace(params, seed=seed) for seed in range(start, start + BATCH)]
        for row in decode_all(engine, drafter, [PROMPT] * BATCH, tokens, settings):
            answers.append(row.token_ids)
            accepted += sum(depth * count for depth, count in row.depth_counts.items())
            steps += row.num_steps
    return torch.tensor(answers), accepted / steps


@pytest.mark.parametrize(
    ("params", "options"), [(WARM, CHAIN), (NARROW, TREE)], ids=["warm, chain", "narrow, tree"]
)
def test_answers_follow_the_distribution(
    engine: Engine, params: SamplingParams, options: dict[str, Any]
) -> None:
    """Answers of three tokens, and the two-token beginnings alone, where power is greater."""
    answers_ST, accepted = drawn_answers(engine, params, options, DRAWS)
    assert accepted > 0.3, "the test needs draws that are accepted"
    assert chi_square_p_value(answers_ST, exact_distribution(right(params), TOKENS)) > LEVEL
    assert chi_square_p_value(answers_ST[:, :2], exact_distribution(right(params), 2)) > LEVEL


def no_residual(*arguments: Any) -> Any:
    """What is left of the distribution is forgotten: the token is drawn from the whole of it."""
    token, _ = accept_drawn(*arguments)
    return token, arguments[0]


def with_replacement(wanted_V: Any, drawn_V: Any, candidates: Any, uniforms: Any) -> Any:
    """Every candidate is taken for a draw from the first one's distribution."""
    token, left_V = None, wanted_V
    for candidate, uniform in zip(candidates, uniforms, strict=True):
        token, left_V = accept_drawn(left_V, drawn_V, [candidate], [uniform])
        if token is not None:
            break
    return token, left_V


def generous(wanted_V: Any, drawn_V: Any, candidates: Any, uniforms: Any) -> Any:
    """Accepts twice as often as the distributions allow."""
    return accept_drawn(wanted_V, drawn_V, candidates, [0.5 * uniform for uniform in uniforms])


@pytest.mark.parametrize(
    ("wrong", "options"),
    [(no_residual, CHAIN), (with_replacement, TREE), (generous, CHAIN)],
    ids=["no residual", "with replacement", "generous"],
)
def test_wrong_rules_are_rejected(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, wrong: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(token_choice, "accept_drawn", wrong)
    answers_ST, _ = drawn_answers(engine, WARM, options, 1024, tokens=2)
    assert chi_square_p_value(answers_ST, exact_distribution(right(WARM), 2)) < 1e-4


def test_a_candidate_discarded_for_its_probability_is_noticed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning a drawn tree breaks the distribution, which is why a drawn tree is never pruned."""
    from medusa_kit.drafters.draft_model.drafter import DraftModelDrafter

    original = DraftModelDrafter.propose

    def pruned(self: DraftModelDrafter, state: State) -> Draft:
        draft = original(self, state)
        assert draft.distributions is not None
        topologies = []
        for row, topology in enumerate(draft.topologies):
            parents = list(topology.parents)
            for node, parent in enumerate(parents):
                token = int(draft.tokens_BN[row, node])
                if parent >= 0 and float(draft.distributions[row][parent][token]) < 0.2:
                    parents[node] = -2
            topologies.append(replace(topology, parents=tuple(parents)))
        return replace(draft, topologies=topologies)

    monkeypatch.setattr(DraftModelDrafter, "propose", pruned)
    answers_ST, _ = drawn_answers(engine, WARM, CHAIN, 1024, tokens=2)
    assert chi_square_p_value(answers_ST, exact_distribution(right(WARM), 2)) < 1e-4


def test_the_rule_alone_against_exact_probabilities() -> None:
    """Every outcome of two candidates is weighed by its probability: their sum is the
    distribution."""
    wanted_V = torch.tensor([0.05, 0.5, 0.3, 0.15], dtype=torch.float64)
    drawn_V = torch.tensor([0.4, 0.1, 0.45, 0.05], dtype=torch.float64)
    result_V, places = torch.zeros(4, dtype=torch.float64), torch.linspace(0, 1, 401)[:-1] + 1 / 800
    for first in range(4):
        for second in range(4):
            if first == second:
                continue
            chance = drawn_V[first] * drawn_V[second] / (1 - drawn_V[first])
            share_first, distribution_V = accepted_share(wanted_V, drawn_V, first, places)
            result_V[first] += chance * share_first
            rest_V = drawn_V.clone()
            rest_V[first] = 0
            share, distribution_V = accepted_share(
                distribution_V, rest_V / rest_V.sum(), second, places
            )
            both, left_V = accept_drawn(wanted_V, drawn_V, [first, second], [1.0, 1.0])
            if share_first < 1:
                result_V[second] += chance * (1 - share_first) * share
                if share < 1:
                    assert both is None
                    assert torch.allclose(left_V, distribution_V)
                    result_V += chance * (1 - share_first) * (1 - share) * left_V
    assert torch.allclose(result_V, wanted_V, atol=2e-3)


def accepted_share(
    wanted_V: torch.Tensor, drawn_V: torch.Tensor, token: int, places: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """(share of uniforms that accept, the distribution left where none does)."""
    outcomes = [accept_drawn(wanted_V, drawn_V, [token], [place]) for place in places.tolist()]
    left = [distribution_V for accepted, distribution_V in outcomes if accepted is None]
    return 1 - len(left) / len(places), left[0] if left else wanted_V


def test_draws_without_replacement_in_the_order_of_their_distribution(engine: Engine) -> None:
    """The first two of `drawn`, over many roots, against the exact distribution of the ordered
    pair."""
    chooser = token_choice.TokenChooser(engine.base, SamplingParams(1.0, seed=4), PROMPT, 9)
    logits_V = torch.tensor([1.0, 0.2, -0.5, 0.9, -2.0, 0.1, 0.0, -1.0])
    seen: Counter[tuple[int, ...]] = Counter()
    for root in range(4000):
        scores_V, distribution_V = chooser.drawn(logits_V, PROMPT, root)
        seen[tuple(scores_V.topk(2).indices.tolist())] += 1
    p = distribution_V.tolist()
    distribution = {(a, b): p[a] * p[b] / (1 - p[a]) for a in range(8) for b in range(8) if a != b}
    assert math.isclose(sum(distribution.values()), 1)
    pairs_ST = torch.tensor([pair for pair, count in seen.items() for _ in range(count)])
    assert chi_square_p_value(pairs_ST, distribution) > LEVEL


def test_greedy_rows_are_as_ever_and_draws_follow_more_often_than_matching(engine: Engine) -> None:
    greedy = engine.generate([PROMPT] * 2, max_new_tokens=20, drafter="none")
    drawn = engine.generate(
        [PROMPT] * 2, max_new_tokens=20, drafter="draft-model", drafter_options=TREE
    )
    assert [row.token_ids for row in drawn] == [row.token_ids for row in greedy]
    chain = {"threshold": 0.2, "width": 1}
    _, matched = drawn_answers(engine, WARM, {**chain, "sampling": "matched"}, 192)
    _, accepted = drawn_answers(engine, WARM, {**chain, "sampling": "rejection"}, 192)
    assert accepted > 0.9 * matched
