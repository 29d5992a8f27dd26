"""Plain decoding, as a tree with one node.

Shapes: B batch, N nodes with root, D hidden.
"""

from typing import Any

import torch

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.forest import Forest
from medusa_kit.transfer import to_device
from medusa_kit.tree.shape import chain

ROOT_ALONE = chain(1)


class PlainDrafter(Drafter):
    name = "none"
    num_nodes = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def propose(self, state: State) -> Forest:
        return Forest(to_device(state.roots_B, self.device), [ROOT_ALONE] * len(state.roots_B))


def build(context: DraftContext, options: Any) -> PlainDrafter:
    return PlainDrafter(context.device)
