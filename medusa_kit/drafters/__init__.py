"""Drafters, one file each, all with the interface of infer/draft.py."""

from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.hydra import HydraDrafter
from medusa_kit.drafters.heads.medusa import HeadsDrafter, MedusaDrafter
from medusa_kit.heads import MedusaHeads
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree


def draft_with(
    heads: MedusaHeads, tree: CandidateTree | DynamicTree
) -> HeadsDrafter | DynamicDrafter:
    """The drafter for these heads and this tree.

    Raises TreeError when the tree needs more heads, or more guesses of a head, than there are.
    """
    if isinstance(tree, DynamicTree):
        return DynamicDrafter(heads, tree)
    return MedusaDrafter(heads, tree) if heads.one_pass else HydraDrafter(heads, tree)
