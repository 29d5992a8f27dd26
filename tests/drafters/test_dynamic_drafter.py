"""Dynamic trees grown by heads against trees found by listing paths; replay against decoding.

In float64, where the rows of a product do not depend on how many there are.
"""

import math

import pytest
import torch
from support.small_engines import (
    build_engine,
    decode_all,
    endless_base,
    random_heads,
    random_prompt,
)
from support.states import state_from
from support.tiny_models import tiny_base

from medusa_kit.data.readers import AnswerRow
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import TreeError
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.decode.drafter import State
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tree.plan import PlannedTree, TreePlan
from medusa_kit.tree.replay import replay_dynamic
from medusa_kit.tuning.calibrate import calibrate, fitted_dynamic_tree

VOCAB, RANKS, TOKENS = 16, 5, 30
KINDS = ["medusa", "hydra", "recurrent"]
SCALES = (1.3, 0.8, 1.6)
SAMPLED = [SamplingParams(0.9, seed=3), SamplingParams(1.2, top_k=9, seed=4), SamplingParams()]


@pytest.fixture(scope="module", params=[*KINDS, "reduced"])
def heads(request: pytest.FixtureRequest) -> MedusaHeads:
    base = endless_base(VOCAB, torch.float64)
    reduced = torch.arange(2, VOCAB) if request.param == "reduced" else None
    kind, projection = request.param, "shared"
    if request.param == "reduced":
        kind, projection = "medusa", "reduced"
    return random_heads(base, kind=kind, projection=projection, reduced_ids=reduced)


@pytest.fixture(scope="module")
def engine(heads: MedusaHeads) -> Engine:
    return build_engine(heads.base, heads=heads)


def state_of(rows: int) -> State:
    generator = torch.Generator().manual_seed(7)
    hidden_BD = torch.randn(rows, 32, dtype=torch.float64, generator=generator)
    return state_from([[] for _ in range(rows)], list(range(3, 3 + rows)), hidden_BD)


@torch.inference_mode()
def guesses_after(heads: MedusaHeads, hidden_D, path: list[int]) -> dict[int, float]:
    """The RANKS likeliest tokens after a path, with log-probabilities; softmax written out."""
    k = len(path) - 1
    logits = heads.project(heads.transform(hidden_D[None], k, torch.tensor([path])), k)[0]
    shares = (logits / SCALES[k]).softmax(-1)
    columns = shares.argsort(descending=True)[:RANKS]
    ids = columns if heads.column_ids is None else heads.column_ids[columns]
    return {int(i): math.log(shares[c]) for i, c in zip(ids, columns, strict=True)}


def paths_by_score(heads: MedusaHeads, hidden_D, root: int, beam: int) -> list[tuple[int, ...]]:
    """Every path below the `beam` best of each depth, most probable first."""
    found: dict[tuple[int, ...], float] = {}
    level = {(root,): 0.0}
    for _ in SCALES:
        below = {
            (*path, token): score + own
            for path, score in level.items()
            for token, own in guesses_after(heads, hidden_D, list(path)).items()
        }
        found |= below
        level = dict(sorted(below.items(), key=lambda item: -item[1])[:beam])
    return sorted(found, key=lambda path: -found[path])


def drafted_paths(tokens: list[int], parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [(tokens[0],)]
    for node in range(1, len(tokens)):
        assert 0 <= parents[node] < node
        paths.append((*paths[parents[node]], tokens[node]))
    return paths[1:]


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 9, 24, 160])
def test_the_most_probable_paths_in_order(heads: MedusaHeads, num_nodes: int) -> None:
    """Up to more nodes than there are paths (5 + 25 + 125; fewer below a beam)."""
    for beam in (2, 3, RANKS**2):
        drafter = draft_with(heads, DynamicTree(num_nodes, SCALES, RANKS, beam))
        assert isinstance(drafter, DynamicDrafter)
        state = state_of(3)
        draft = drafter.propose(state)
        for row, (tokens, shape) in enumerate(zip(draft.token_lists(), draft.shapes, strict=True)):
            width = RANKS**2 if heads.one_pass else beam
            every = paths_by_score(heads, state.hidden_BD[row], state.roots_B[row], width)
            paths = drafted_paths(tokens, shape.parents)
            assert paths == every[: num_nodes - 1]
            assert len(set(paths)) == len(paths)


def test_rows_of_a_batch_grow_trees_of_their_own(heads: MedusaHeads) -> None:
    draft = draft_with(heads, DynamicTree(9, SCALES, RANKS, 3)).propose(state_of(6))
    assert len(set(draft.shapes)) > 1


def test_trees_that_do_not_fit_are_refused(heads: MedusaHeads, engine: Engine) -> None:
    for tree in (DynamicTree(4, (1.0,) * 4, RANKS), DynamicTree(4, SCALES, VOCAB + 1)):
        with pytest.raises(TreeError, match="dynamic tree"):
            draft_with(heads, tree)
        with pytest.raises(TreeError, match="dynamic tree"):
            engine.use_tree(tree)


def test_decoding_is_exact_greedy_and_sampled(engine: Engine) -> None:
    """Alone and together; some guesses hold, on every depth."""
    prompts = [random_prompt(length, length, VOCAB) for length in (2, 19, 7)]
    plain = [decode_all(engine, engine.drafter_for("none"), [prompt], TOKENS, [params])[0]
             for prompt, params in zip(prompts, SAMPLED, strict=True)]  # fmt: skip
    for num_nodes in (2, 6, 24):
        tree = DynamicTree(num_nodes, SCALES, RANKS, 3)
        engine.use_tree(tree)
        drafter = engine.drafter_for(None, batch_size=3)
        rows = decode_all(engine, drafter, prompts, TOKENS, SAMPLED)
        assert [row.token_ids for row in rows] == [row.token_ids for row in plain]
        assert drafter.num_nodes == num_nodes
    depths = {depth for row in rows for depth in row.depth_counts}
    assert depths >= {0, 1, 2}


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3", "gpt2"])
def test_decoding_is_exact_in_other_families(family: str) -> None:
    engine = build_engine(tiny_base(family))
    prompts = [random_prompt(length, length) for length in (2, 19, 7)]
    plain = engine.generate(prompts, max_new_tokens=20, drafter="none")
    engine.heads = random_heads(engine.base, kind="hydra")
    engine.use_tree(DynamicTree(12, SCALES, RANKS, 3))
    drafted = engine.generate(prompts, max_new_tokens=20)
    assert [row.token_ids for row in drafted] == [row.token_ids for row in plain]


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[AnswerRow]:
    """Plain ones."""
    prompts = [random_prompt(2 + 3 * seed, seed, VOCAB) for seed in range(6)]
    plain = engine.generate(prompts, max_new_tokens=TOKENS, drafter="none")
    return [
        AnswerRow(prompt, result.token_ids, "length", str(seed), seed + 1)
        for seed, (prompt, result) in enumerate(zip(prompts, plain, strict=True))
    ]


def test_a_tree_is_fitted(heads: MedusaHeads, answers: list[AnswerRow]) -> None:
    fitted = fitted_dynamic_tree(heads.base, heads, answers, 40)
    assert (fitted.num_nodes, len(fitted.temperatures)) == (40, 3)
    assert fitted.smoothing


@pytest.mark.parametrize("smoothing", [(), (5.0, 2.0)])
def test_replay_counts_the_steps_of_decoding(
    engine: Engine, heads: MedusaHeads, answers: list[AnswerRow], smoothing: tuple[float, ...]
) -> None:
    """What calibration records for the largest tree holds for every smaller one."""
    prompts = [answer.prompt_ids for answer in answers]
    largest = DynamicTree(40, SCALES, RANKS, 3, smoothing)
    statistics = calibrate(heads.base, heads, answers, VOCAB, largest)
    assert statistics.meta["dynamic"] == largest.as_dict()
    for num_nodes in (2, 5, 12, 40):
        engine.use_tree(DynamicTree(num_nodes, SCALES, RANKS, 3, smoothing))
        results = engine.generate(prompts, max_new_tokens=TOKENS)
        replayed = replay_dynamic(num_nodes, statistics)
        assert [r.token_ids for r in results] == [a.response_ids for a in answers]
        assert sum(r.stats.num_steps for r in results) == replayed.num_steps
    assert replayed.steps_by_depth[2] > 0


def test_the_engine_takes_the_tree_of_its_batch_size(engine: Engine) -> None:
    grown = DynamicTree(6, SCALES, RANKS, 3)
    plan = TreePlan((PlannedTree(1, CandidateTree.chain(2), grown),
                     PlannedTree(3, CandidateTree.chain(1))))  # fmt: skip
    engine.use_tree(plan)
    assert [engine.drafter_for(None, batch_size=size).num_nodes for size in (1, 2, 3, 8)] == [
        6,
        6,
        2,
        2,
    ]
    assert engine.tree == grown
    engine.use_tree(CandidateTree.chain(3))
    assert engine.drafter_for(None, batch_size=3).num_nodes == 4
