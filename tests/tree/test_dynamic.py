"""Growing best first against listing every path; what a dynamic tree may not be."""

import math
from itertools import product

import numpy as np
import pytest

from medusa_kit.errors import TreeError
from medusa_kit.tree.dynamic import DynamicTree, best_first

FIELDS = {
    "num_nodes": 8,
    "temperatures": [1.5, 2.0],
    "num_ranks": 4,
    "beam": 3,
    "smoothing": [9.0, 2.0],
}


def random_scores(seed: int, num_heads: int, num_ranks: int) -> list[list[float]]:
    """Log-probabilities that fall, in eighths, so that sums are exact and ties common."""
    steps = np.random.default_rng(seed).integers(0, 6, (num_heads, num_ranks))
    return (-steps.cumsum(1) / 8).tolist()


def grown(scores_KR: list[list[float]], num_nodes: int, least: float = -math.inf):
    """A guess of rank r is token r, whatever the path."""
    after = [list(enumerate(row)) for row in scores_KR]
    return best_first(99, lambda path: after[len(path) - 1], len(scores_KR), num_nodes, least)


@pytest.mark.parametrize("seed", range(12))
def test_best_first_takes_the_most_probable_of_all_paths(seed: int) -> None:
    heads, ranks = [(3, 4), (1, 6), (4, 2)][seed % 3]
    scores_KR = random_scores(seed, heads, ranks)
    every = [p for d in range(1, heads + 1) for p in product(range(ranks), repeat=d)]
    score_of = {p: sum(scores_KR[k][r] for k, r in enumerate(p)) for p in every}
    expected = sorted(score_of.values(), reverse=True)
    for num_nodes in (2, 3, 9, len(every) + 1, len(every) + 5):
        rank_of, parents, scores = grown(scores_KR, num_nodes)
        assert len(parents) == min(num_nodes, len(every) + 1)
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(parents)):
            assert 0 <= parents[node] < node
            paths.append((*paths[parents[node]], rank_of[node]))
        assert len(set(paths)) == len(paths)
        assert scores == [0.0, *(score_of[path] for path in paths[1:])]
        assert [score_of[path] for path in paths[1:]] == expected[: num_nodes - 1]


def test_smaller_trees_begin_larger_ones() -> None:
    scores_KR = random_scores(5, 3, 5)
    largest = grown(scores_KR, 60)
    for num_nodes in range(2, 60):
        assert grown(scores_KR, num_nodes) == tuple(part[:num_nodes] for part in largest)


def test_unlikely_paths_are_left_out() -> None:
    scores_KR = random_scores(5, 3, 5)
    whole, likely = grown(scores_KR, 60), grown(scores_KR, 60, -0.5)
    assert 1 < len(likely[0]) < 60
    assert likely == tuple(part[: len(likely[0])] for part in whole)
    assert whole[2][len(likely[0])] < -0.5


def test_guesses_may_depend_on_the_path() -> None:
    """Token 7 follows 5 for certain, and nothing follows 7."""
    after = {5: [(7, 0.0)], 3: [(5, -0.5), (6, -1.0)]}
    found = best_first(3, lambda path: after.get(path[-1], []), 3, 9)
    assert found == ([3, 5, 7, 6], [-1, 0, 1, 0], [0.0, -0.5, -0.5, -1.0])


def test_fields_round_trip() -> None:
    tree = DynamicTree.from_dict(FIELDS)
    assert (tree.temperatures, tree.depth) == ((1.5, 2.0), 2)
    assert tree.as_dict() == FIELDS
    saved_before = {name: value for name, value in FIELDS.items() if name != "smoothing"}
    assert DynamicTree.from_dict(saved_before).smoothing == ()
    assert DynamicTree.from_dict({**saved_before, "doubts": [9.0]}).smoothing == (9.0,)
    with pytest.raises(TreeError, match="doubts"):
        DynamicTree.from_dict({**FIELDS, "doubts": [9.0]})
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
        ({"temperatures": [10**400]}, "expected one number above 0"),
        ({"smoothing": [10**400]}, "smoothing of a dynamic tree is"),
        ({"smoothing": [1e308]}, "each at most 1,000,000,000"),
        ({"smoothing": 4.0}, "smoothing of a dynamic tree is"),
        ({"smoothing": [1.0, -1.0]}, "smoothing of a dynamic tree is"),
        ({"smoothing": [1.0] * 9}, "expected at most 8 numbers above 0"),
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
    with pytest.raises(TreeError, match="4 draft tokens of a head, expected at most 3"):
        tree.check_fits(num_heads=2, num_ranks=3)
