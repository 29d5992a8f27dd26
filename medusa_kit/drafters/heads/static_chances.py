"""How likely the nodes of a static tree are before any step: as calibration counted them, else by
how deep they are and of which rank."""

from collections.abc import Sequence

from medusa_kit.drafters.estimates import DEEPER, FIRST_GUESS, NEXT_RANK
from medusa_kit.tree.candidate_tree import CandidateTree


def own_chances(tree: CandidateTree, calibrated: Sequence[float] | None = None) -> list[float]:
    """The chance that a node is right, given that its parent is, for each node; 1 for the root.

    `calibrated`: the share of steps that accepted each node below the root, where known.
    """
    if calibrated is None:
        kinds = zip(tree.depths[1:], tree.ranks[1:], strict=True)
        return [1.0, *(FIRST_GUESS * DEEPER ** (d - 1) * NEXT_RANK**rank for d, rank in kinds)]
    whole = [1.0, *calibrated]
    pairs = ((share, whole[up]) for share, up in zip(calibrated, tree.parents[1:], strict=True))
    return [1.0, *(min(share / above, 1.0) if above else 0.0 for share, above in pairs)]


def path_chances(tree: CandidateTree, calibrated: Sequence[float] | None = None) -> list[float]:
    """The chance that a node and all of its path are right."""
    if calibrated is not None:
        return [1.0, *calibrated]
    chances = [1.0]
    for own, parent in zip(own_chances(tree)[1:], tree.parents[1:], strict=True):
        chances.append(own * chances[parent])
    return chances
