"""How likely the nodes of a static tree are before any step: as calibration counted them, else by
how deep they are and of which rank."""

from collections.abc import Sequence

from medusa_kit.drafters.estimates import DEEPER, FIRST_GUESS, NEXT_RANK
from medusa_kit.tree.candidate_tree import CandidateTree


def path_chances(tree: CandidateTree, calibrated: Sequence[float] | None = None) -> list[float]:
    """The chance that a node and all of its path are right, for each node; 1 for the root.

    `calibrated`: the share of steps that accepted each node below the root, where known.
    """
    if calibrated is not None:
        return [1.0, *calibrated]
    pairs = zip(tree.depths[1:], tree.paths, strict=True)
    return [1.0] + [
        FIRST_GUESS * DEEPER ** (depth - 1) * NEXT_RANK ** sum(path) for depth, path in pairs
    ]


def own_chances(tree: CandidateTree, calibrated: Sequence[float] | None = None) -> list[float]:
    """The same, given that the parent is right."""
    whole = path_chances(tree, calibrated)
    above = [1.0] + [whole[parent] for parent in tree.parents[1:]]
    return [min(one / up, 1.0) if up else 0.0 for one, up in zip(whole, above, strict=True)]
