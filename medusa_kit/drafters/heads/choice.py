"""The drafter for heads and their tree, and for an engine's."""

from typing import Any

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.hydra import HydraDrafter
from medusa_kit.drafters.heads.medusa import HeadsDrafter, MedusaDrafter
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.errors import ConfigError
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.mkl_linear import pack_for_rows
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree


def draft_with(
    heads: MedusaHeads, tree: CandidateTree | DynamicTree
) -> HeadsDrafter | DynamicDrafter:
    """The drafter for these heads and this tree.

    Raises TreeError when the tree needs more heads, or more draft tokens of a head, than there are.
    """
    if isinstance(tree, DynamicTree):
        return DynamicDrafter(heads, tree)
    return MedusaDrafter(heads, tree) if heads.one_pass else HydraDrafter(heads, tree)


def build(context: DraftContext, options: Any) -> HeadsSource:
    """Raises ConfigError where there are no heads."""
    if context.heads is None or context.tree is None:
        raise ConfigError(
            f"there are no heads for {context.base.info.name!r} to draft with",
            hint="train some with `medusa-kit train`, or use another drafter: --drafter auto",
        )
    pack_for_rows(context.base.own_modules(), context.tree.num_nodes * context.batch_size)
    return HeadsSource(draft_with(context.heads, context.tree), context.acceptance)
