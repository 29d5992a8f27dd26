"""Builds a drafter for an engine's rows from its name and options.

A drafter is a file with a `build`, registered in settings/drafter_names.py (docs/drafters.md).
"""

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from medusa_kit.base.model import BaseModel
from medusa_kit.drafters.memory import Memory
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.cpu.activations import activations_of
from medusa_kit.infer.cpu.verifier import refuse_large_trees
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.drafter_names import REGISTERED
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
    paying: bool = False  # whether draft tokens are verified only where they gain
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


def build_drafter(
    name: str, context: DraftContext, options: Mapping[str, Any] | None = None
) -> Drafter:
    """Raises ConfigError for an unknown name or option, for trees that are too large for the
    activations, or where there is nothing to draft with."""
    checked = drafter_options(name, options)
    module = importlib.import_module(f"medusa_kit.drafters.{REGISTERED[name]}")
    drafter: Drafter = module.build(context, checked)
    refuse_large_trees(activations_of(context.verifier), drafter.num_nodes)
    return drafter
