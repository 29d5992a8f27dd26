"""Plain decoding, as a tree with one node.

Shapes: B batch, N nodes with root, D hidden.
"""

import torch
from torch import Tensor

from medusa_kit.infer.draft import ROOT, Draft, State, StatelessDrafter, Topology
from medusa_kit.infer.transfer import to_device


class PlainDrafter(StatelessDrafter):
    name = "none"
    num_nodes = 1

    def __init__(self, device: torch.device) -> None:
        self.topology = Topology.from_parents([ROOT], device)

    def propose(self, state: State) -> Draft:
        roots_B1 = to_device(state.roots_B, self.topology.depths_N.device)[:, None]
        return Draft(roots_B1, [self.topology] * len(state.roots_B))

    def alike(self, other: object) -> bool:
        return type(self) is type(other)

    def fill(self, hidden_BD: Tensor, roots_B: Tensor, on_device: bool = False) -> Tensor:
        return roots_B[:, None]
