"""Chances of a static tree's nodes before any step."""

import pytest

from medusa_kit.drafters.heads.static_chances import own_chances
from medusa_kit.tree.candidate_tree import CandidateTree

TREE = CandidateTree.from_choices([[0], [1], [0, 0], [0, 1], [0, 0, 0]])


def test_calibrated_shares_are_of_whole_paths() -> None:
    """A node's own chance is its share of the steps in which its parent was right."""
    shares = dict(zip(TREE.paths, (0.5, 0.2, 0.3, 0.1, 0.0), strict=True))
    own = dict(zip(TREE.paths, own_chances(TREE, list(shares.values()))[1:], strict=True))
    for path, share in shares.items():
        above = shares.get(path[:-1], 1.0)
        assert own[path] == pytest.approx(min(share / above, 1.0) if above else 0.0)


def test_nodes_below_one_that_was_never_right_have_no_chance() -> None:
    assert own_chances(CandidateTree.chain(2), [0.0, 0.0]) == [1.0, 0.0, 0.0]


def test_without_calibration_at_most_one_of_some_siblings_is_expected_to_be_right() -> None:
    many = CandidateTree.from_choices([[0], *([0, rank] for rank in range(40))])
    own = own_chances(many)
    assert sum(own[2:]) <= 1
    assert own[1] == own[2] > own[3] > own[4]
