"""Drafters: every way of guessing ahead, one file each, with one interface (infer/draft.py)."""

from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.hydra import HydraDrafter
from medusa_kit.drafters.heads.medusa import MedusaDrafter
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.draft import Drafter
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree


def draft_with(heads: MedusaHeads, tree: CandidateTree | DynamicTree) -> Drafter:
    """The drafter for these heads and this tree; static ones by whether heads read the path.

    Raises TreeError when the tree is deeper than there are heads, or wider than a head.
    """
    if isinstance(tree, DynamicTree):
        return DynamicDrafter(heads, tree)
    return MedusaDrafter(heads, tree) if heads.one_pass else HydraDrafter(heads, tree)
