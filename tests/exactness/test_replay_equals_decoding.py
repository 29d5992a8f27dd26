"""Replay on statistics counts the very steps that decoding takes, one by one.

In float64, where no rounding can flip a guess. The model has sixteen tokens, so that random heads
are right now and then; the answers are the engine's own, written by plain decoding.
"""

import numpy as np
import pytest
import torch
from support.partly_knowing import TREES
from support.small_engines import build_engine, endless_base, random_heads, random_prompt

from medusa_kit.base.model import wrap_model
from medusa_kit.data.readers import AnswerRow
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.replay import replay
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning.calibrate import calibrate

VOCAB, TOKENS = 16, 30
ALL_TREES = {
    **TREES,
    "full": CandidateTree([*[(a,) for a in range(8)], *[(a, b) for a in range(8) for b in range(8)],
                           *[(a, b, c) for a in range(3) for b in range(3) for c in range(3)]]),
    "deep": CandidateTree([(0,), (3,), (3, 1), (3, 1, 7), (3, 1, 2), (0, 15)]),
}  # fmt: skip
Case = tuple[Engine, list[AnswerRow], RankStatistics]


@pytest.fixture(scope="module", params=["shared", "reduced", "hydra", "recurrent"])
def case(request: pytest.FixtureRequest) -> Case:
    """An engine with heads, answers that end by length and by stop token, their statistics.

    The reduced projection lacks two of the tokens, so some truths are out of the heads' reach.
    """
    base = endless_base(VOCAB, torch.float64)
    reduced = torch.arange(2, VOCAB) if request.param == "reduced" else None
    kind = request.param if request.param not in ("shared", "reduced") else "medusa"
    projection = "shared" if reduced is None else "reduced"
    heads = random_heads(base, projection=projection, reduced_ids=reduced, kind=kind)
    engine = build_engine(base, heads=heads)
    if request.param == "reduced":  # a token that the first answer holds becomes the stop token
        plain = engine.generate(random_prompt(2, 0, VOCAB), max_new_tokens=TOKENS, drafter="none")
        base.model.generation_config.eos_token_id = plain.token_ids[TOKENS // 2]
        base = wrap_model(base.model)
        engine = build_engine(base, heads=heads)
    answers = []
    for seed in range(8):
        prompt = random_prompt(2 + 3 * seed, seed, VOCAB)
        result = engine.generate(prompt, max_new_tokens=TOKENS - seed, drafter="none")
        answers.append(
            AnswerRow(prompt, result.token_ids, result.finish_reason, str(seed), seed + 1)
        )
    return engine, answers, calibrate(base, heads, answers, num_ranks=VOCAB)


def test_the_case_is_worth_testing(case: Case) -> None:
    engine, answers, statistics = case
    assert statistics.num_answers == len(answers)
    assert statistics.num_positions == sum(len(answer.response_ids) for answer in answers)
    reasons = {answer.finish_reason for answer in answers}
    assert engine.heads is not None
    if engine.heads.column_ids is None:
        assert reasons == {"length"}
    else:
        assert "stop" in reasons
    assert replay(ALL_TREES["full"], statistics).steps_by_depth[2] > 3


def fitting(tree: CandidateTree, engine: Engine) -> bool:
    assert engine.heads is not None
    return tree.num_ranks <= engine.heads.num_columns


def test_requests_take_as_many_steps(case: Case) -> None:
    """Each alone, by what its statistics say; `bushy` fits heads of every kind."""
    engine, answers, statistics = case
    tree = ALL_TREES["bushy"]
    replayed = replay(tree, statistics)
    engine.use_tree(tree)
    prompts = [answer.prompt_ids for answer in answers]
    results = [
        engine.generate(prompt, max_new_tokens=TOKENS - seed, drafter="medusa")
        for seed, prompt in enumerate(prompts)
    ]
    assert [r.token_ids for r in results] == [a.response_ids for a in answers]
    assert sum(r.stats.num_steps for r in results) == replayed.num_steps
    tokens = sum(r.stats.new_tokens for r in results)
    steps = max(replayed.num_steps, 1)
    assert (tokens - len(results)) / steps == pytest.approx(replayed.acceptance_length)


@pytest.mark.parametrize("name", ALL_TREES)
def test_every_step_starts_and_ends_where_replay_says(case: Case, name: str) -> None:
    """All answers decoded in one batch; a step starts after the tokens emitted before its root."""
    engine, answers, statistics = case
    tree = ALL_TREES[name]
    if not fitting(tree, engine):
        pytest.skip("the reduced projection has too few columns for this tree")
    assert engine.heads is not None
    rows = [
        make_request(engine.verifier, answer.prompt_ids, SamplingParams(), TOKENS - seed)
        for seed, answer in enumerate(answers)
    ]
    index_of = {id(row): index for index, row in enumerate(rows)}
    starts: list[list[int]] = [[] for _ in rows]
    steps = Scheduler(engine.verifier).run(rows, draft_with(engine.heads, tree))
    for number, emitted in enumerate(steps):
        for row, tokens in emitted:
            if number > 0:  # the first yield is the prefill's
                starts[index_of[id(row)]].append(len(row.token_ids) - len(tokens) - 1)
    replayed = replay(tree, statistics)
    bounds = [*statistics.starts.tolist(), statistics.num_positions]
    for index, begin in enumerate(bounds[:-1]):
        inside = replayed.starts_P[begin : bounds[index + 1]]
        assert starts[index] == np.flatnonzero(inside).tolist()
    counts, drafted = [0] * (tree.depth + 1), [0] * (tree.depth + 1)
    for row in rows:
        for depth, count in row.depth_counts.items():
            counts[depth] += count
        for (_, num_nodes, depth), count in row.drafted_steps.items():
            drafted[depth] += count if num_nodes == tree.num_nodes else 0
    assert counts == replayed.steps_by_depth
    assert drafted == (counts if tree.depth else [0])
