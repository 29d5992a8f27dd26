"""The drafter for an engine's heads and their tree."""

from typing import Any

from medusa_kit.drafters import draft_with
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.heads.source import HeadsSource
from medusa_kit.errors import ConfigError
from medusa_kit.infer.mkl_linear import pack_for_rows


def build(context: DraftContext, options: Any) -> HeadsSource:
    """Raises ConfigError where there are no heads."""
    if context.heads is None or context.tree is None:
        raise ConfigError(
            f"there are no heads for {context.base.info.name!r} to draft with",
            hint="train some with `medusa-kit train`, or use another drafter, such as auto",
        )
    pack_for_rows(context.base.own_modules(), context.tree.num_nodes * context.batch_size)
    return HeadsSource(draft_with(context.heads, context.tree), context.acceptance)
