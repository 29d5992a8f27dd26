"""Drafters: every way of guessing ahead, one file each, behind one interface (base.py)."""

from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.drafters.base import Drafter
from medusa_kit.infer.drafters.hydra import HydraDrafter
from medusa_kit.infer.drafters.medusa import MedusaDrafter
from medusa_kit.tree.candidate_tree import CandidateTree


def draft_with(heads: MedusaHeads, tree: CandidateTree) -> Drafter:
    """The drafter for these heads, by whether they can run before the tree is filled.

    Raises TreeError when the tree is deeper than there are heads, or wider than a head.
    """
    return MedusaDrafter(heads, tree) if heads.one_pass else HydraDrafter(heads, tree)
