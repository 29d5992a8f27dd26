"""Builds a drafter for an engine's rows from its name and options.

A new drafter needs a file with a `build`, its name in settings/engine.py, options in
settings/drafters.py, a line in BUILDERS and a test (docs/drafters.md).
"""

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from medusa_kit.base.model import BaseModel
from medusa_kit.drafters import draft_with
from medusa_kit.drafters.heads.confident import ConfidentDrafter
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.paying import HeadsRecord, PayingDrafter
from medusa_kit.drafters.heads.worth import HeadsWorth
from medusa_kit.drafters.memory import Memory
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.errors import ConfigError
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.cpu.activations import activations_of
from medusa_kit.infer.cpu.mkl_linear import pack_for_rows
from medusa_kit.infer.cpu.verifier import refuse_large_trees
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.drafters import drafter_options
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.plan import Tree

T = TypeVar("T")


@dataclass
class DraftContext:
    """What a drafter can be built from. `memory` (tables, models) lives as long as the engine."""

    verifier: Verifier
    heads: MedusaHeads | None = None
    tree: Tree | None = None  # for this batch size
    acceptance: Sequence[float] | None = None  # of its nodes, as calibrated (tree/plan.py)
    paying: bool = False  # whether guesses are verified only where they pay
    draft_model: str | BaseModel | None = None
    batch_size: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    memory: Memory = field(default_factory=Memory)
    heads_refused: str | None = None  # why heads that were found are not in use

    @property
    def base(self) -> BaseModel:
        return self.verifier.base

    @property
    def device(self) -> torch.device:
        return self.verifier.base.device

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What an earlier request stored under `key`, else what `make` returns."""
        return self.memory.remembered(key, make)


Builder = Callable[[DraftContext, Any], Drafter]


def build_drafter(
    name: str, context: DraftContext, options: Mapping[str, Any] | None = None
) -> Drafter:
    """Raises ConfigError for an unknown name or option, for trees that are too large for the
    activations, or where there is nothing to draft with."""
    checked = drafter_options(name, options)
    drafter = BUILDERS[name](context, checked)
    refuse_large_trees(activations_of(context.verifier), drafter.num_nodes)
    return drafter


def _plain(context: DraftContext, options: Any) -> Drafter:
    return PlainDrafter(context.device)


def _heads(context: DraftContext, options: Any) -> Drafter:
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


def _in(module: str) -> Builder:
    """The `build` of a drafter's module, which is imported at first use."""

    def build(context: DraftContext, options: Any) -> Drafter:
        found = importlib.import_module(f"medusa_kit.drafters.{module}")
        return cast(Drafter, found.build(context, options))

    return build


BUILDERS: dict[str, Builder] = {
    "auto": _in("mixed.auto"),
    "combined": _in("mixed.combined"),
    "draft-model": _in("draft_model.drafter"),
    "lookahead": _in("text.lookahead"),
    "medusa": _heads,
    "mtp": _in("native.mtp"),
    "none": _plain,
    "prompt-lookup": _in("text.prompt_lookup"),
    "recycling": _in("text.recycling"),
    "suffix": _in("text.suffix"),
}
