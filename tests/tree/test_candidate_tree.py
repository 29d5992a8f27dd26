import json
import random

import numpy as np
import pytest

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree, load_tree, save_tree

FORK = ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 1))


# Nodes at depth 1, 2, ... of the nine trees published for Medusa; each has 63 below the root, ranks
# 0 to 9, and siblings that begin at rank 0.
PUBLISHED = {
    "mc_sim_7b_63": (10, 28, 23, 2),
    "vicuna_7b_stage1": (10, 32, 20, 1),
    "vicuna_7b_stage1_ablation": (10, 21, 25, 7),
    "vicuna_7b_stage2": (10, 23, 23, 7),
    "vicuna_13b_stage1": (10, 29, 23, 1),
    "vicuna_13b_stage2": (10, 19, 25, 9),
    "vicuna_33b_stage1": (10, 34, 19),
    "vicuna_33b_stage2": (10, 24, 24, 5),
    "zephyr_stage2": (10, 27, 23, 3),
}


def published_like_choices(counts: tuple[int, ...] = PUBLISHED["mc_sim_7b_63"]) -> list[list[int]]:
    """A list of that shape: at each depth the paths of the smallest ranks that have a parent."""
    choices, parents = [], [[]]
    for count in counts:
        below = [[*parent, rank] for parent in parents for rank in range(10)]
        parents = sorted(below, key=lambda path: (sum(path), path))[:count]
        choices += parents
    return choices


def test_nodes_follow_by_depth_then_path():
    tree = CandidateTree(tuple(reversed(FORK)))
    assert tree.paths == FORK
    assert (tree.num_nodes, tree.depth, tree.num_ranks) == (7, 3, 3)
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 4)
    assert tree.depths == (0, 1, 1, 2, 2, 2, 3)
    assert tree.ranks == (0, 0, 1, 0, 2, 0, 1)
    assert [tree.children(node) for node in range(7)] == [(1, 2), (3, 4), (5,), (), (6,), (), ()]


def test_ancestors_are_the_prefixes():
    tree = CandidateTree(FORK)
    paths = ((), *FORK)
    expected = [[paths[i][: len(paths[j])] == paths[j] for j in range(7)] for i in range(7)]
    ancestors_NN = tree.ancestors()
    assert ancestors_NN.dtype == bool
    assert ancestors_NN.tolist() == expected


def test_root_only_and_chain():
    root = CandidateTree.root_only()
    assert (root.num_nodes, root.depth, root.num_ranks, root.parents) == (1, 0, 0, (-1,))
    assert root.ancestors().tolist() == [[True]]
    assert CandidateTree.chain(0) == root
    assert CandidateTree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    with pytest.raises(TreeError, match="-1"):
        CandidateTree.chain(-1)


@pytest.mark.parametrize("element", [list, tuple])
def test_published_lists_in_any_order(element):
    choices = published_like_choices()
    shuffled = [element(choice) for choice in choices]
    random.Random(3).shuffle(shuffled)
    tree = CandidateTree.from_choices(shuffled)
    assert tree.num_nodes == 64
    assert np.bincount(tree.depths).tolist() == [1, 10, 28, 23, 2]
    assert (tree.depth, tree.num_ranks) == (4, 10)
    assert sorted(tree.to_choices()) == sorted(choices)
    assert tree == CandidateTree.from_choices(choices)
    assert hash(tree) == hash(CandidateTree.from_choices(choices))


def test_numpy_ranks_become_ints():
    tree = CandidateTree.from_choices([[np.int64(0)]])
    assert type(tree.paths[0][0]) is int
    assert json.dumps(tree.to_choices()) == "[[0]]"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [0, 1, 0]], r"\[0, 1, 0\] has no parent: \[0, 1\] is missing"),
        ([[0], [1], [0]], r"\[0\] occurs twice"),
        ([[0], [-1]], r"\[-1\] holds -1"),
        ([[0], []], "a path is empty"),
        ([[0], [0.0]], r"holds 0\.0"),
        ([[True]], "holds True"),
        ([["0"]], "holds '0'"),
        ([0, 1], "path 0 is not a list"),
        ("01", "choices are '01'"),
        (None, "choices are None"),
    ],
)
def test_impossible_trees_are_refused(choices, message):
    with pytest.raises(TreeError, match=message):
        CandidateTree.from_choices(choices)


def test_check_fits():
    tree = CandidateTree(FORK)
    tree.check_fits(num_heads=3, num_ranks=3)
    with pytest.raises(TreeError, match="depth 3, expected at most 2"):
        tree.check_fits(num_heads=2, num_ranks=3)
    with pytest.raises(TreeError, match="rank 2, expected ranks below 2"):
        tree.check_fits(num_heads=3, num_ranks=2)
    CandidateTree.root_only().check_fits(num_heads=0, num_ranks=0)


def test_file_round_trip(tmp_path):
    path = tmp_path / "deeper" / "tree.json"
    extra = {"acceptance_length": 2.5, "base": {"name": "größer"}}
    save_tree(CandidateTree(FORK), path, extra)
    assert load_tree(path) == (CandidateTree(FORK), extra)
    document = json.loads(path.read_text())
    assert document["format"] == "medusa-kit-tree"
    assert (document["version"], document["num_nodes"]) == (1, 7)
    assert document["choices"][-1] == [0, 2, 1]
    assert [file.name for file in path.parent.iterdir()] == ["tree.json"]


def test_root_only_round_trip(tmp_path):
    save_tree(CandidateTree.root_only(), tmp_path / "tree.json", {})
    assert load_tree(tmp_path / "tree.json") == (CandidateTree.root_only(), {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_lists_as_published_load_and_round_trip(tmp_path, name):
    """Bare lists by falling worth, not by depth, as the published ones are."""
    choices = published_like_choices(PUBLISHED[name])
    random.Random(name).shuffle(choices)
    (tmp_path / "choices.json").write_text(json.dumps(choices))
    tree, extra = load_tree(tmp_path / "choices.json")
    assert (tree.num_nodes, tree.num_ranks, extra) == (64, 10, {})
    assert np.bincount(tree.depths).tolist() == [1, *PUBLISHED[name]]
    assert sorted(tree.to_choices()) == sorted(choices)
    save_tree(tree, tmp_path / "tree.json", {})
    assert load_tree(tmp_path / "tree.json") == (tree, {})


def test_plain_list_loads(tmp_path):
    path = tmp_path / "choices.json"
    path.write_text(json.dumps(published_like_choices()))
    assert load_tree(path) == (CandidateTree.from_choices(published_like_choices()), {})


def test_extra_cannot_overwrite_the_format(tmp_path):
    with pytest.raises(TreeError, match="'choices'"):
        save_tree(CandidateTree.chain(1), tmp_path / "tree.json", {"choices": []})
    assert list(tmp_path.iterdir()) == []


HEAD = '{"format": "medusa-kit-tree", "version": 1, '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [1", "not a JSON file"),
        ("", "not a JSON file"),
        ("3", "not a tree file"),
        ('{"choices": [[0]]}', "not a tree file"),
        ('{"format": "medusa-kit-tree", "version": 2}', "version 2, expected 1"),
        (HEAD + '"num_nodes": 2}', "choices are None"),
        (HEAD + '"num_nodes": 2, "choices": [[0], [1]]}', "num_nodes is 2, .* 3 nodes"),
        (HEAD + '"num_nodes": 2, "choices": [[0, 0]]}', r"\[0\] is missing"),
        ("[[0], [2, 0]]", r"\[2\] is missing"),
        (HEAD + '"num_nodes": 2, "choices": [[0]], "choices": [[1]]}', "'choices' is given twice"),
    ],
)
def test_malformed_files_are_named(tmp_path, text, message):
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(TreeError, match=rf"tree\.json: .*{message}"):
        load_tree(path)


def test_missing_file_and_wrong_encoding(tmp_path):
    with pytest.raises(TreeError, match=r"none\.json: cannot be read"):
        load_tree(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00[")
    with pytest.raises(TreeError, match="not a JSON file"):
        load_tree(tmp_path / "bytes.json")
