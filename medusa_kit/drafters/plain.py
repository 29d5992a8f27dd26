"""Plain decoding, as a tree with one node.

Shapes: B batch, N nodes with root, D hidden.
"""

from typing import Any

import torch

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.infer.draft import ROOT, Draft, Drafter, State, Topology, root_draft


class PlainDrafter(Drafter):
    name = "none"
    num_nodes = 1

    def __init__(self, device: torch.device) -> None:
        self.device, self.topology = device, Topology.from_parents([ROOT], device)

    def propose(self, state: State) -> Draft:
        return root_draft(state.roots_B, self.device)


def build(context: DraftContext, options: Any) -> PlainDrafter:
    return PlainDrafter(context.device)
