"""The contents of tree.json: the tree to decode with, and one for each larger batch size searched.

A larger batch verifies more rows with the same nodes, so a step costs more and smaller trees win.
The file holds one static tree and two optional sections: `dynamic` (grow trees of that size
instead) and `larger_batches`. A reader that knows neither decodes with the static tree of batch
size 1, just as exactly.
"""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree, load_tree, save_tree
from medusa_kit.tree.dynamic import DynamicTree

Tree = CandidateTree | DynamicTree
SECTIONS = ("dynamic", "larger_batches")


@dataclass(frozen=True)
class PlannedTree:
    """The tree from a batch size on; `dynamic`, where given, is used instead of `static`."""

    batch_size: int
    static: CandidateTree
    dynamic: DynamicTree | None = None

    @property
    def tree(self) -> Tree:
        return self.dynamic or self.static

    def as_dict(self) -> dict[str, Any]:
        fields = {"num_nodes": self.static.num_nodes, "choices": self.static.to_choices()}
        dynamic = {} if self.dynamic is None else {"dynamic": self.dynamic.as_dict()}
        return {"batch_size": self.batch_size, **fields, **dynamic}


@dataclass(frozen=True)
class TreePlan:
    """Trees by rising batch size, the first for batch size 1.

    Raises TreeError when the first is for another batch size, or batch sizes do not rise.
    """

    trees: tuple[PlannedTree, ...]

    def __post_init__(self) -> None:
        sizes = [planned.batch_size for planned in self.trees]
        if sizes[:1] != [1] or any(low >= high for low, high in pairwise(sizes)):
            raise TreeError(f"trees are for batch sizes {sizes}, expected rising ones from 1")

    @classmethod
    def of(cls, static: CandidateTree, dynamic: DynamicTree | None = None) -> "TreePlan":
        """The same tree for every batch size."""
        return cls((PlannedTree(1, static, dynamic),))

    def for_batch(self, batch_size: int) -> Tree:
        """The tree of the nearest batch size at or below the given one."""
        fitting = [planned.tree for planned in self.trees if planned.batch_size <= batch_size]
        return (fitting or [self.trees[0].tree])[-1]

    def check_fits(self, num_heads: int, num_ranks: int) -> None:
        """Raise TreeError when a tree needs more heads, or more guesses of a head, than given."""
        for planned in self.trees:
            planned.tree.check_fits(num_heads, num_ranks)


def save_plan(plan: TreePlan, path: str | pathlib.Path, extra: dict[str, Any]) -> None:
    """Write tree.json, with the further fields of `extra`.

    Raises TreeError when `extra` uses the name of a field of the format.
    """
    if taken := [name for name in SECTIONS if name in extra]:
        raise TreeError(f"extra field {taken[0]!r} is a field of the tree format itself")
    first, *larger = plan.trees
    sections: dict[str, Any] = {}
    if first.dynamic is not None:
        sections["dynamic"] = first.dynamic.as_dict()
    if larger:
        sections["larger_batches"] = [planned.as_dict() for planned in larger]
    save_tree(first.static, path, {**sections, **extra})


def load_plan(path: str | pathlib.Path) -> TreePlan:
    """Read what `save_plan` or `save_tree` wrote, or a bare list of paths.

    Raises TreeError, which names the file and the fault.
    """
    static, extra = load_tree(path)
    try:
        first = PlannedTree(1, static, _dynamic(extra))
        larger = extra.get("larger_batches", [])
        if not isinstance(larger, list):
            raise TreeError(f"larger_batches is {larger!r}, expected a list")
        return TreePlan((first, *(_planned(fields) for fields in larger)))
    except TreeError as error:
        raise TreeError(f"{path}: {error.message}", hint=error.hint) from error


def _planned(fields: Any) -> PlannedTree:
    batch_size = fields.get("batch_size") if isinstance(fields, dict) else None
    if type(batch_size) is not int:
        raise TreeError(
            f"an entry of larger_batches has batch_size {batch_size!r}, expected a whole number"
        )
    choices: Sequence[Sequence[int]] = fields.get("choices")
    static = CandidateTree.from_choices(choices)
    if fields.get("num_nodes") != static.num_nodes:
        raise TreeError(
            f"num_nodes for batch size {batch_size} is {fields.get('num_nodes')!r}, but the "
            f"choices make {static.num_nodes} nodes with the root"
        )
    return PlannedTree(batch_size, static, _dynamic(fields))


def _dynamic(fields: dict[str, Any]) -> DynamicTree | None:
    return DynamicTree.from_dict(fields["dynamic"]) if "dynamic" in fields else None
