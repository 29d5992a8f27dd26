import pytest

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.render import WIDTH, render_tree

FORK = CandidateTree(((0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 0, 2), (2, 0)))


def test_ranks_alone():
    assert render_tree(FORK).splitlines() == [
        "root (9 nodes, depth 3)",
        "├── 0",
        "│   ├── 0",
        "│   │   └── 2",
        "│   └── 1",
        "├── 1",
        "├── 2",
        "│   └── 0",
        "└── 3",
    ]


def test_values_and_tokens_stand_beside_their_node():
    tree = CandidateTree(((0,), (1,), (1, 4)))
    drawn = render_tree(tree, [1.0, 0.5, 0.254, 0.1], ["Hi", " the", "\n", "é│"])
    assert drawn.splitlines() == [
        'root "Hi" (4 nodes, depth 2)',
        '├── 0 50.0% " the"',
        '└── 1 25.4% "\\n"',
        '    └── 4 10.0% "é│"',
    ]


def test_root_alone():
    assert render_tree(CandidateTree.root_only(), [1.0]) == "root (1 node, depth 0)"


def test_sibling_leaves_share_lines_of_limited_width():
    tree = CandidateTree((*((rank,) for rank in range(60)), (59, 0)))
    lines = render_tree(tree, [0.01] * tree.num_nodes).splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    leaves = [line.split(" ", 1)[1] for line in lines[1:-2]]
    assert " · ".join(leaves) == " · ".join(f"{rank} 1.0%" for rank in range(59))
    assert 1 < len(leaves) < 20
    assert lines[-2:] == ["└── 59 1.0%", "    └── 0 1.0%"]


def test_every_entry_belongs_to_a_node():
    with pytest.raises(TreeError, match="8 values for a tree of 9 nodes"):
        render_tree(FORK, [1.0] * 8)
    with pytest.raises(TreeError, match="10 tokens for a tree of 9 nodes"):
        render_tree(FORK, tokens=["x"] * 10)
