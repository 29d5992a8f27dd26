"""What drafters read from files, read when an engine is loaded: damage is told then, once, and not
by each request."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.mixed.sources import usual_sources
from medusa_kit.settings.drafters import DraftModelOptions, drafter_options

HEADS, DRAFT_MODEL = "medusa", "draft-model"


def read_files(context: DraftContext, name: str, options: Mapping[str, Any] | None) -> None:
    """Read the draft model, MTP layers and past answers of the drafter of this name, and the draft
    model that a call may ask for instead. They stay in the context's memory.

    Raises what building the drafter raises.
    """
    checked = drafter_options(name, options)
    without_heads = replace(context, heads=None, tree=None)  # which are read already, or come later
    names, given = [name], {name: checked}
    if name == "auto":
        names, given = usual_sources(without_heads, checked.sources)[0], checked.options
    if context.draft_model is not None and DRAFT_MODEL not in names:
        names, given = [*names, DRAFT_MODEL], {**given, DRAFT_MODEL: DraftModelOptions(num_nodes=2)}
    for source in names:
        if source != HEADS:
            build_drafter(source, without_heads, given.get(source))
