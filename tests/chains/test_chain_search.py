"""A tree search on a model that carries a state: chains alone, with what they leave unread."""

import numpy as np
import pytest
from support.models.hybrids import tiny_hybrid_base
from support.rank_tables import random_statistics
from support.small_engines import BUSHY, build_engine, random_heads

from medusa_kit.engine.engine import Engine
from medusa_kit.errors import TreeError
from medusa_kit.infer.chains.verifier import MAX_UNREAD
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.replay import replay
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning import chains as module
from medusa_kit.tuning.chains import unread_by_replay
from medusa_kit.tuning.step_time import measure_step_times
from medusa_kit.tuning.tree_search import judge_tree, search_tree

PLAIN, NODE, UNREAD = 1.0, 0.2, 0.3  # of a step; of a further node; of all unread tokens


@pytest.fixture(scope="module")
def engine() -> Engine:
    base = tiny_hybrid_base("lfm2")
    return build_engine(base, heads=random_heads(base))


@pytest.fixture
def statistics() -> RankStatistics:
    return random_statistics(0, [40] * 30, num_ranks=6, missing=0.3)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(_, trees, batch_size=1, num_unread=0, **__):  # type: ignore[no-untyped-def]
        more = UNREAD * num_unread / MAX_UNREAD
        return {
            key: PLAIN + NODE * (tree.num_nodes - 1) + (more if tree.num_nodes > 1 else 0)
            for key, tree in trees.items()
        }

    monkeypatch.setattr(module, "measure_step_times", measured)


@pytest.mark.usefixtures("times")
def test_chains_of_each_length_are_compared(engine: Engine, statistics: RankStatistics) -> None:
    search = search_tree(engine, statistics)
    assert [row.tree for row in search.rows] == [CandidateTree.chain(d) for d in range(4)]
    _, held_out = statistics.split(0.25, seed=0)
    plain = search.rows[0].step_seconds
    for row in search.rows[1:]:
        assert row.acceptance_length == replay(row.tree, held_out).acceptance_length
        left = unread_by_replay(row.tree, held_out)
        assert left.tokens > 0.5
        alone = PLAIN + NODE + UNREAD
        expected = PLAIN + NODE * (row.num_nodes - 1) + UNREAD * left.tokens / MAX_UNREAD
        assert row.step_seconds == pytest.approx(expected + alone * left.forwards)
        assert row.speed_up == pytest.approx(row.acceptance_length * plain / row.step_seconds)
    assert search.chosen.acceptance is not None


@pytest.mark.usefixtures("times")
def test_of_a_given_tree_its_chain_is_judged(engine: Engine, statistics: RankStatistics) -> None:
    assert judge_tree(engine, statistics, BUSHY).chosen.tree == CandidateTree.chain(3)
    assert search_tree(engine, statistics, fixed_size=3).chosen.num_nodes == 3
    with pytest.raises(TreeError, match="depth 4"):
        search_tree(engine, statistics, fixed_size=5)


@pytest.mark.parametrize("seed", range(4))
def test_what_stays_unread_is_counted_as_decoding_does(seed: int) -> None:
    statistics = random_statistics(seed, [30, 1, 7, 60], missing=0.2 + 0.2 * seed)
    tree = CandidateTree.chain(2)
    tokens = forwards = steps = 0
    ends = [*statistics.starts[1:], statistics.num_positions]
    for start, end in zip(statistics.starts, ends, strict=True):
        place, unread = int(start), 0
        while place < end - 1:
            if unread > MAX_UNREAD:
                forwards, unread = forwards + 1, 0
            tokens, steps = tokens + unread, steps + 1
            right = int(np.argmax([*(statistics.ranks_PK[place, :2] != 0), True]))
            unread = 0 if right == 2 else unread + 1 + right
            place += 1 + right
    found = unread_by_replay(tree, statistics)
    assert found.tokens == pytest.approx(tokens / steps, rel=0.1)  # the last step may be left out
    assert found.forwards == pytest.approx(forwards / steps, abs=2 / steps)


def test_steps_are_timed_with_unread_tokens(engine: Engine) -> None:
    read: list[int] = []
    forward = engine.base.model.forward

    def counting(ids_BT, *args, **kwargs):  # type: ignore[no-untyped-def]
        read.append(ids_BT.shape[1])
        return forward(ids_BT, *args, **kwargs)

    engine.base.model.forward = counting
    try:
        trees = {2: CandidateTree.chain(1), 1: CandidateTree.chain(0)}
        measure_step_times(engine, trees, [8], repeats=2, num_unread=5)
    finally:
        del engine.base.model.forward
    assert set(read) == {8, 1, 2 + 5}  # the prompt, plain steps, chains
