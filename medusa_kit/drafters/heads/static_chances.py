"""How likely the nodes of a static tree are before any step: as calibration counted them, else by
their rank."""

from collections.abc import Sequence

from medusa_kit.tree.candidate_tree import CandidateTree


def own_chances(tree: CandidateTree, calibrated: Sequence[float] | None = None) -> list[float]:
    """The chance that a node is right, given that its parent is, for each node; 1 for the root.

    `calibrated`: the share of steps that accepted each node below the root, where known.
    """
    if calibrated is None:
        return [1.0, *(0.5 ** (1 + rank) for rank in tree.ranks[1:])]  # siblings make 1 at most
    whole = [1.0, *calibrated]
    pairs = ((share, whole[up]) for share, up in zip(calibrated, tree.parents[1:], strict=True))
    return [1.0, *(min(share / above, 1.0) if above else 0.0 for share, above in pairs)]
