from itertools import product

import numpy as np
import pytest
from support.rank_tables import random_statistics

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.replay import replay
from medusa_kit.tree.search import SMOOTHINGS, best_trees, ranked_paths
from medusa_kit.tree.statistics import RankStatistics


def all_paths(num_heads: int, num_ranks: int) -> list[tuple[int, ...]]:
    depths = range(1, num_heads + 1)
    return [path for depth in depths for path in product(range(num_ranks), repeat=depth)]


def closed_trees(num_heads: int, num_ranks: int, num_nodes: int) -> set[frozenset]:
    """Every tree of that many nodes, by adding one allowed node at a time."""
    trees = {frozenset([()])}
    for _ in range(num_nodes - 1):
        trees = {
            tree | {path}
            for tree in trees
            for path in all_paths(num_heads, num_ranks)
            if path not in tree and path[:-1] in tree
        }
    return trees


def share(path: tuple[int, ...], statistics: RankStatistics, weights: np.ndarray) -> float:
    rows = statistics.ranks_PK.tolist()
    begins = [tuple(row[: len(path)]) == path for row in rows]
    return sum(w for w, b in zip(weights, begins, strict=True) if b) / sum(weights)


def smoothed(path, statistics: RankStatistics, strength: float) -> float:
    """The definition, written as a recursion."""
    if not path:
        return 1.0
    rows = statistics.ranks_PK.tolist()
    head = [row[len(path) - 1] for row in rows if row[len(path) - 1] != -1]
    marginal = head.count(path[-1]) / len(head)
    count, parent = (sum(tuple(row[: len(p)]) == p for row in rows) for p in (path, path[:-1]))
    conditional = (count + strength * marginal) / (parent + strength)
    return smoothed(path[:-1], statistics, strength) * conditional


@pytest.mark.parametrize(("num_heads", "num_ranks", "num_nodes"), [(2, 3, 5), (3, 2, 6), (2, 2, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_sorting_finds_the_best_of_all_trees(num_heads, num_ranks, num_nodes, seed):
    statistics = random_statistics(seed, [9, 1, 14, 6], num_heads, num_ranks)
    weights = np.random.default_rng(seed).integers(0, 4, statistics.num_positions)
    value_of = {path: share(path, statistics, weights) for path in all_paths(num_heads, num_ranks)}
    best = max(
        sum(value_of[path] for path in tree if path)
        for tree in closed_trees(num_heads, num_ranks, num_nodes)
    )
    paths, values = ranked_paths(statistics, num_nodes, weights)
    assert len(paths) == num_nodes - 1
    assert values == pytest.approx([value_of[path] for path in paths])
    assert sum(values) == pytest.approx(best)
    assert CandidateTree(tuple(paths)).num_nodes == num_nodes


@pytest.mark.parametrize("strength", [0.5, 4.0, 256.0])
def test_smoothed_values_follow_the_definition(strength):
    statistics = random_statistics(2, [20, 1, 15])
    paths, values = ranked_paths(statistics, 40, smoothing=strength)
    assert set(paths) == set(all_paths(3, 3))
    assert values == pytest.approx([smoothed(path, statistics, strength) for path in paths])


def test_strong_smoothing_is_the_product_of_marginals():
    statistics = random_statistics(2, [20, 1, 15])
    marginals_KR = statistics.marginals()
    paths, values = ranked_paths(statistics, 40, smoothing=1e12)
    expected = [np.prod([marginals_KR[k, r] for k, r in enumerate(path)]) for path in paths]
    assert values == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 16.0])
@pytest.mark.parametrize("seed", range(4))
def test_values_fall_and_parents_come_first(smoothing, seed):
    statistics = random_statistics(seed, [30, 12, 3], num_heads=4)
    # Weights that are no exact binary fractions, so that sums round.
    weights = np.random.default_rng(seed).random(statistics.num_positions)
    paths, values = ranked_paths(statistics, 121, weights, smoothing)
    assert len(paths) == len(set(paths)) == 120
    assert values == sorted(values, reverse=True)
    value_of = {(): 1.0}
    for path, value in zip(paths, values, strict=True):
        assert 0.0 <= value <= value_of[path[:-1]]
        value_of[path] = value


def test_fewer_nodes_are_a_prefix():
    statistics = random_statistics(5, [30, 12, 3])
    paths, values = ranked_paths(statistics, 25, smoothing=4.0)
    for num_nodes in range(1, 25):
        fewer = ranked_paths(statistics, num_nodes, smoothing=4.0)
        assert fewer == (paths[: num_nodes - 1], values[: num_nodes - 1])


def test_ties_go_to_the_smaller_depth_then_path():
    ranks = np.array([[0, 0], [1, 1], [0, 0], [1, -1], [-1, -1]])
    paths, values = ranked_paths(RankStatistics(ranks, np.array([0]), 2), 7)
    assert paths == [(0,), (1,), (0, 0), (1, 1), (0, 1), (1, 0)]
    assert values == pytest.approx([0.4, 0.4, 0.4, 0.2, 0.0, 0.0])


def test_ranked_paths_refuses_nonsense():
    statistics = random_statistics(0, [6])
    for weights in (np.zeros(6), -np.ones(6), np.ones(5), np.full(6, np.nan), np.full(6, np.inf)):
        with pytest.raises(TreeError, match="weights"):
            ranked_paths(statistics, 3, weights)
    with pytest.raises(TreeError, match="0 nodes"):
        ranked_paths(statistics, 0)
    with pytest.raises(TreeError, match=r"smoothing -1"):
        ranked_paths(statistics, 3, smoothing=-1.0)
    with pytest.raises(TreeError, match="hold no token"):
        ranked_paths(random_statistics(0, []), 3)


def test_best_trees_keep_what_replays_longest():
    fit, held_out = random_statistics(6, [40] * 10).split(0.4, seed=0)
    results = best_trees(fit, [8, 1, 4, 8], held_out)
    assert list(results) == [1, 4, 8]
    for size, result in results.items():
        assert result.tree.num_nodes == size
        assert result.replayed_length == replay(result.tree, held_out).acceptance_length
        assert result.promised_length == pytest.approx(sum(result.values_N))
        assert result.values_N[0] == 1.0
        for smoothing in SMOOTHINGS:
            paths, _ = ranked_paths(fit, size, smoothing=smoothing)
            plain = replay(CandidateTree(tuple(paths)), held_out)
            assert result.replayed_length >= plain.acceptance_length
    assert (results[1].promised_length, results[1].replayed_length) == (1.0, 1.0)


def test_values_belong_to_their_nodes():
    statistics = random_statistics(6, [40] * 5)
    result = best_trees(statistics, [6], rounds=0)[6]
    smoothing = float(result.method.rsplit(" ", 1)[1])
    value_of = dict(zip(*ranked_paths(statistics, 6, smoothing=smoothing), strict=True))
    assert result.values_N[1:] == tuple(value_of[path] for path in result.tree.paths)


def visits_matter() -> RankStatistics:
    """Rank 0 is right at 6 rows of 16, rank 1 at 5. But a step that takes rank 0 jumps over the
    next row, often one where rank 0 was right too: 3 of the 8 steps it makes, against 5 rank 1s.
    """
    ranks = ([0] * 6 + [1, 32767] * 5) * 3 + [-1]
    return RankStatistics(np.array(ranks)[:, None], np.array([0]), 2)


def test_reweighting_finds_what_uniform_weights_miss():
    statistics = visits_matter()
    uniform = best_trees(statistics, [2], rounds=0)[2]
    reweighted = best_trees(statistics, [2])[2]
    assert uniform.tree.paths == ((0,),)
    assert reweighted.tree.paths == ((1,),)
    assert reweighted.replayed_length > uniform.replayed_length
    assert reweighted.method.startswith("visited positions, round 1")


def test_search_is_deterministic():
    fit, held_out = random_statistics(9, [25] * 8).split(0.25, seed=1)
    assert best_trees(fit, [3, 9], held_out) == best_trees(fit, [3, 9], held_out)


def test_no_step_to_reweight_by():
    result = best_trees(random_statistics(0, [1, 1]), [3])[3]
    assert result.replayed_length == result.promised_length == 1.0
    assert result.tree.paths == ((0,), (1,))


def test_best_trees_refuses_nonsense():
    statistics = random_statistics(0, [6, 7], num_heads=2, num_ranks=2)
    with pytest.raises(TreeError, match="no tree sizes"):
        best_trees(statistics, [])
    for size in (0, 8):
        with pytest.raises(TreeError, match=f"{size} nodes cannot exist; expected 1 to 7"):
            best_trees(statistics, [2, size])
    assert best_trees(statistics, [7])[7].tree.num_nodes == 7
    empty = random_statistics(0, [], num_heads=2, num_ranks=2)
    with pytest.raises(TreeError, match="statistics hold no token"):
        best_trees(empty, [2])
    with pytest.raises(TreeError, match="held-out statistics hold no token"):
        best_trees(statistics, [2], held_out=empty)
