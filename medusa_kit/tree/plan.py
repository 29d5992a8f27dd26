"""The contents of tree.json: the tree to decode with, and one for each larger batch size searched.

A larger batch verifies more rows with the same nodes, so a step costs more and smaller trees win.
The file holds one static tree and three optional sections: `dynamic` (grow trees of that size
instead), `larger_batches`, and `acceptance`: the share of steps that accepted each node of the tree
in use, root excluded, on answers that were held out. A reader that knows none decodes with the
static tree of batch size 1, just as exactly.
"""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from medusa_kit.errors import TreeError
from medusa_kit.files import parse_json
from medusa_kit.tree.candidate_tree import CandidateTree, load_tree, save_tree
from medusa_kit.tree.dynamic import DynamicTree

Tree = CandidateTree | DynamicTree
SECTIONS = ("dynamic", "larger_batches", "acceptance")


@dataclass(frozen=True)
class PlannedTree:
    """The tree from a batch size on; `dynamic`, where given, is used instead of `static`.

    `acceptance`: of each node in the order of the tree in use, root excluded, the share of steps
    that accepted it and so all of its path; None where it was not measured.
    Raises TreeError for shares that are none, or not one for each node.
    """

    batch_size: int
    static: CandidateTree
    dynamic: DynamicTree | None = None
    acceptance: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.acceptance is not None:
            shares = _checked_shares(self.acceptance, self.tree.num_nodes - 1)
            object.__setattr__(self, "acceptance", shares)

    @property
    def tree(self) -> Tree:
        return self.dynamic or self.static

    def as_chain(self) -> "PlannedTree":
        """The chain to verify instead: of a static tree the first draft token below the root, its
        first draft token, and so on; for a dynamic one a chain as deep."""
        if self.dynamic is not None:
            depth = min(len(self.dynamic.temperatures), self.dynamic.num_nodes - 1)
            return PlannedTree(self.batch_size, CandidateTree.chain(depth))
        shares = dict(zip(self.static.paths, self.acceptance or (), strict=False))
        kept = [path for path in self.static.paths if not any(path)]
        acceptance = tuple(shares[path] for path in kept) if shares else None
        return PlannedTree(self.batch_size, CandidateTree(tuple(kept)), None, acceptance)

    def as_dict(self) -> dict[str, Any]:
        fields = {"num_nodes": self.static.num_nodes, "choices": self.static.to_choices()}
        return {"batch_size": self.batch_size, **fields, **self.sections()}

    def sections(self) -> dict[str, Any]:
        """What the file says of it besides the static tree."""
        dynamic = {} if self.dynamic is None else {"dynamic": self.dynamic.as_dict()}
        shares = {} if self.acceptance is None else {"acceptance": list(self.acceptance)}
        return {**dynamic, **shares}


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
        """A plan with one tree for every batch size."""
        return cls((PlannedTree(1, static, dynamic),))

    @classmethod
    def of_any(cls, tree: "Tree | TreePlan") -> "TreePlan":
        """The plan itself, or one of this tree."""
        return tree if isinstance(tree, TreePlan) else cls.of_tree(tree)

    @classmethod
    def of_tree(cls, tree: Tree) -> "TreePlan":
        """The same, for a tree of either sort."""
        if isinstance(tree, DynamicTree):
            return cls.of(CandidateTree.root_only(), tree)
        return cls.of(tree)

    @property
    def digest(self) -> str:
        """What tells these trees from others, in files that are made with them."""
        text = json.dumps([planned.as_dict() for planned in self.trees], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def as_chains(self) -> "TreePlan":
        """The plan with the likeliest path of each tree, for models that verify chains alone."""
        return TreePlan(tuple(planned.as_chain() for planned in self.trees))

    def for_batch(self, batch_size: int) -> Tree:
        """The tree of the nearest batch size at or below the given one."""
        return self.planned_for(batch_size).tree

    def planned_for(self, batch_size: int) -> PlannedTree:
        """The same, with what is known of it."""
        fitting = [planned for planned in self.trees if planned.batch_size <= batch_size]
        return (fitting or [self.trees[0]])[-1]

    def check_fits(self, num_heads: int, num_ranks: int) -> None:
        """Raise TreeError when a tree needs more heads, or more draft tokens of a head, than
        given."""
        for planned in self.trees:
            planned.tree.check_fits(num_heads, num_ranks)


def fitted(tree: Tree | TreePlan, chains_only: bool) -> Tree | TreePlan:
    """The tree itself, or the likeliest path of each for a model that verifies chains alone."""
    return TreePlan.of_any(tree).as_chains() if chains_only else tree


def save_plan(plan: TreePlan, path: str | pathlib.Path, extra: dict[str, Any]) -> None:
    """Write tree.json, with the further fields of `extra`.

    Raises TreeError when `extra` uses the name of a field of the format.
    """
    if taken := [name for name in SECTIONS if name in extra]:
        raise TreeError(f"extra field {taken[0]!r} is a field of the tree format itself")
    first, *larger = plan.trees
    sections = first.sections()
    if larger:
        sections["larger_batches"] = [planned.as_dict() for planned in larger]
    save_tree(first.static, path, {**sections, **extra})


def load_plan(path: str | pathlib.Path) -> TreePlan:
    """Read what `save_plan` or `save_tree` wrote, or a bare list of paths.

    Raises TreeError, which names the file and the fault.
    """
    static, extra = load_tree(path)
    try:
        first = _with_acceptance(PlannedTree(1, static, _dynamic(extra)), extra)
        larger = extra.get("larger_batches", [])
        if not isinstance(larger, list):
            raise TreeError(f"larger_batches is {larger!r}, expected a list")
        return TreePlan((first, *(_planned(fields) for fields in larger)))
    except TreeError as error:
        raise TreeError(f"{path}: {error.message}", hint=error.hint) from error


def read_fields(path: pathlib.Path | None) -> dict[str, Any]:
    """What the file says of its trees; nothing where there is no file, a bare list of paths, or
    one that cannot be read, as reading the tree tells."""
    with suppress(OSError, ValueError):
        raw = parse_json(path.read_text(encoding="utf-8")) if path is not None else None
        if isinstance(raw, dict):
            return raw
    return {}


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
    return _with_acceptance(PlannedTree(batch_size, static, _dynamic(fields)), fields)


def _dynamic(fields: dict[str, Any]) -> DynamicTree | None:
    return DynamicTree.from_dict(fields["dynamic"]) if "dynamic" in fields else None


def _with_acceptance(planned: PlannedTree, fields: dict[str, Any]) -> PlannedTree:
    """null is no list of shares, either."""
    if "acceptance" not in fields:
        return planned
    shares = _checked_shares(fields["acceptance"], planned.tree.num_nodes - 1)
    return replace(planned, acceptance=shares)


def _checked_shares(found: Any, count: int) -> tuple[float, ...]:
    if not isinstance(found, list | tuple) or len(found) != count or not all(map(_is_share, found)):
        raise TreeError(
            f"acceptance is {found!r}, expected a number from 0 to 1 for each of the {count} nodes "
            "below the root",
            hint="run `medusa-kit tree-search` again, or remove the section",
        )
    return tuple(float(share) for share in found)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
