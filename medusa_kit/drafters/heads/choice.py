"""The drafter for an engine's heads: their whole tree at each step, or as much of it as pays."""

from typing import Any

from medusa_kit.drafters import draft_with
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.heads.confident import ConfidentDrafter
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.paying import HeadsRecord, PayingDrafter
from medusa_kit.drafters.heads.worth import HeadsWorth
from medusa_kit.errors import ConfigError
from medusa_kit.infer.cpu.mkl_linear import pack_for_rows
from medusa_kit.infer.draft import Drafter


def build(context: DraftContext, options: Any) -> Drafter:
    """Raises ConfigError where there are no heads."""
    if context.heads is None or context.tree is None:
        raise ConfigError(
            f"there are no heads for {context.base.info.name!r} to draft with",
            hint="train some with `medusa-kit train`, or use another drafter, such as auto",
        )
    pack_for_rows(context.base, context.tree.num_nodes * context.batch_size)
    drafter = draft_with(context.heads, context.tree)
    if not context.paying:
        return drafter
    if isinstance(drafter, DynamicDrafter):
        key = ("what draft tokens were worth", context.tree, context.sampling.temperature)
        return ConfidentDrafter(drafter, context.remembered(key, HeadsWorth))
    key = ("how often nodes were right", context.tree, context.sampling.temperature)
    return PayingDrafter(drafter, context.remembered(key, HeadsRecord), context.acceptance)
