"""Growing best first against listing every path; what a dynamic tree may not be."""

from itertools import product

import numpy as np
import pytest

from medusa_kit.errors import TreeError
from medusa_kit.tree.dynamic import DynamicTree, best_first

FIELDS = {"num_nodes": 8, "temperatures": [1.5, 2.0], "num_ranks": 4, "beam": 3}


def random_scores(seed: int, num_heads: int, num_ranks: int) -> list[list[float]]:
    """Log-probabilities that fall, in eighths, so that sums are exact and ties common."""
    steps = np.random.default_rng(seed).integers(0, 6, (num_heads, num_ranks))
    return (-steps.cumsum(1) / 8).tolist()


@pytest.mark.parametrize("seed", range(12))
def test_best_first_takes_the_most_probable_of_all_paths(seed: int) -> None:
    heads, ranks = [(3, 4), (1, 6), (4, 2)][seed % 3]
    scores_KR = random_scores(seed, heads, ranks)
    every = [p for d in range(1, heads + 1) for p in product(range(ranks), repeat=d)]
    score_of = {p: sum(scores_KR[k][r] for k, r in enumerate(p)) for p in every}
    expected = sorted(score_of.values(), reverse=True)
    for num_nodes in (2, 3, 9, len(every) + 1, len(every) + 5):
        parents, depths, rank_of = best_first(scores_KR, num_nodes)
        assert len(parents) == min(num_nodes, len(every) + 1)
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(parents)):
            assert 0 <= parents[node] < node
            paths.append((*paths[parents[node]], rank_of[node]))
            assert depths[node] == len(paths[-1])
        assert len(set(paths)) == len(paths)
        assert [score_of[path] for path in paths[1:]] == expected[: num_nodes - 1]


def test_smaller_trees_begin_larger_ones() -> None:
    scores_KR = random_scores(5, 3, 5)
    largest = best_first(scores_KR, 60)
    for num_nodes in range(2, 60):
        smaller = best_first(scores_KR, num_nodes)
        assert smaller == tuple(part[:num_nodes] for part in largest)


def test_fields_round_trip() -> None:
    tree = DynamicTree.from_dict(FIELDS)
    assert (tree.temperatures, tree.depth) == ((1.5, 2.0), 2)
    assert tree.as_dict() == FIELDS
    assert DynamicTree(2, (1.0, 1.0)).depth == 1  # one node below the root has no room for two


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes": 1}, "num_nodes of a dynamic tree is 1"),
        ({"num_nodes": 8.0}, r"num_nodes of a dynamic tree is 8\.0"),
        ({"num_ranks": 0}, "num_ranks of a dynamic tree is 0"),
        ({"beam": True}, "beam of a dynamic tree is True"),
        ({"temperatures": []}, "temperatures of a dynamic tree are"),
        ({"temperatures": [1.0, 0.0]}, "expected one number above 0"),
        ({"temperatures": [float("nan")]}, "expected one number above 0"),
        ({"temperatures": ["1"]}, "expected one number above 0"),
        ({"temperatures": 1.0}, "expected one number above 0"),
        ({"temperature": 1.0}, "has the fields"),
    ],
)
def test_impossible_dynamic_trees_are_refused(change: dict, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        DynamicTree.from_dict({**FIELDS, **change})


def test_other_things_are_no_dynamic_tree() -> None:
    for fields in (None, True, [8], {"num_nodes": 8}):
        with pytest.raises(TreeError, match="has the fields"):
            DynamicTree.from_dict(fields)


def test_check_fits() -> None:
    tree = DynamicTree.from_dict(FIELDS)
    tree.check_fits(num_heads=2, num_ranks=4)
    with pytest.raises(TreeError, match="2 temperatures, expected at most 1"):
        tree.check_fits(num_heads=1, num_ranks=4)
    with pytest.raises(TreeError, match="4 guesses of a head, expected at most 3"):
        tree.check_fits(num_heads=2, num_ranks=3)
