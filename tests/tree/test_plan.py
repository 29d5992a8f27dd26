"""tree.json with dynamic trees and trees by batch size: round trip, old readers, bad content."""

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree, load_tree, save_tree
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tree.plan import PlannedTree, TreePlan, load_plan, save_plan

BUSHY = CandidateTree(((0,), (1,), (0, 0), (0, 2)))
GROWN = DynamicTree(5, (1.25, 1.5), num_ranks=6, beam=2)
PLAN = TreePlan(
    (
        PlannedTree(1, BUSHY, GROWN),
        PlannedTree(4, CandidateTree.chain(2)),
        PlannedTree(16, CandidateTree.root_only()),
    )
)


def test_round_trip_with_every_section(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "tree.json", {"base_model": "b"})
    assert load_plan(tmp_path / "tree.json") == PLAN
    # A reader of one static tree finds it, and everything else among the extra fields.
    tree, extra = load_tree(tmp_path / "tree.json")
    assert tree == BUSHY
    assert extra["base_model"] == "b"


def test_how_often_nodes_were_right_is_kept_for_the_tree_in_use(tmp_path: Path) -> None:
    plan = TreePlan(
        (
            PlannedTree(1, CandidateTree.chain(1), GROWN, (0.5, 0.25, 0.2, 0.1)),  # GROWN's nodes
            PlannedTree(4, CandidateTree.chain(2), acceptance=(0.4, 0.1)),
        )
    )
    save_plan(plan, tmp_path / "tree.json", {})
    read = load_plan(tmp_path / "tree.json")
    assert read == plan
    assert read.planned_for(1).acceptance == (0.5, 0.25, 0.2, 0.1)
    assert read.planned_for(9).acceptance == (0.4, 0.1)
    assert load_tree(tmp_path / "tree.json")[0] == CandidateTree.chain(1)


@pytest.mark.parametrize("bad", [[0.5], [0.5, 1.5], [0.5, "1"], [True, 0.5], 0.5, {}, None])
def test_acceptance_that_is_none_of_the_trees_is_refused(tmp_path: Path, bad: Any) -> None:
    path = tmp_path / "tree.json"
    save_plan(TreePlan.of(CandidateTree.chain(2)), path, {})
    path.write_text(json.dumps({**json.loads(path.read_text()), "acceptance": bad}))
    with pytest.raises(TreeError, match=r"acceptance is .* for each of the 2 nodes") as refused:
        load_plan(path)
    assert str(path) in refused.value.message


def test_one_static_tree_is_written_as_ever(tmp_path: Path) -> None:
    save_plan(TreePlan.of(BUSHY), tmp_path / "plan.json", {"base_model": "b"})
    save_tree(BUSHY, tmp_path / "tree.json", {"base_model": "b"})
    assert (tmp_path / "plan.json").read_text() == (tmp_path / "tree.json").read_text()
    assert load_plan(tmp_path / "tree.json") == TreePlan.of(BUSHY)
    (tmp_path / "choices.json").write_text("[[0], [0, 0]]")
    assert load_plan(tmp_path / "choices.json") == TreePlan.of(CandidateTree.chain(2))


def test_the_nearest_batch_size_below() -> None:
    expected = {1: GROWN, 2: GROWN, 3: GROWN, 4: CandidateTree.chain(2), 15: CandidateTree.chain(2),
                16: CandidateTree.root_only(), 99: CandidateTree.root_only()}  # fmt: skip
    assert {size: PLAN.for_batch(size) for size in expected} == expected


def test_every_tree_has_to_fit() -> None:
    PLAN.check_fits(2, 6)
    with pytest.raises(TreeError, match="dynamic tree has 2 temperatures"):
        PLAN.check_fits(1, 6)
    deep = TreePlan((PlannedTree(1, BUSHY), PlannedTree(2, CandidateTree.chain(3))))
    with pytest.raises(TreeError, match="depth 3"):
        deep.check_fits(2, 6)


@pytest.mark.parametrize("sizes", [(), (2,), (1, 4, 4), (1, 4, 2)])
def test_batch_sizes_rise_from_one(sizes: tuple[int, ...]) -> None:
    with pytest.raises(TreeError, match="expected rising ones from 1"):
        TreePlan(tuple(PlannedTree(size, BUSHY) for size in sizes))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dynamic": True}, "has the fields"),
        ({"dynamic": {**GROWN.as_dict(), "beam": 0}}, "beam of a dynamic tree is 0"),
        ({"dynamic": {**GROWN.as_dict(), "width": 3}}, "has the fields"),
        ({"larger_batches": 4}, "larger_batches is 4"),
        ({"larger_batches": [4]}, "batch_size None"),
        ({"larger_batches": [{"batch_size": "4"}]}, "batch_size '4'"),
        ({"larger_batches": [{"batch_size": 4}]}, "choices are None"),
        ({"larger_batches": [{"batch_size": 4, "num_nodes": 3, "choices": [[0]]}]},
         "num_nodes for batch size 4 is 3, .* 2 nodes"),
        ({"larger_batches": [{"batch_size": 1, "num_nodes": 2, "choices": [[0]]}]},
         r"batch sizes \[1, 1\]"),
    ],
)  # fmt: skip
def test_bad_sections_are_refused_by_name(tmp_path: Path, sections: Any, message: str) -> None:
    path = tmp_path / "tree.json"
    save_tree(BUSHY, path, sections)
    with pytest.raises(TreeError, match=rf"tree\.json: .*{message}"):
        load_plan(path)


def test_extra_fields_cannot_pass_for_sections(tmp_path: Path) -> None:
    for name in ("dynamic", "larger_batches", "choices"):
        with pytest.raises(TreeError, match=f"'{name}'"):
            save_plan(PLAN, tmp_path / "tree.json", {name: json.loads("[]")})
