"""Plain decoding is the tree with one node."""

import torch

from medusa_kit.infer.drafters.base import ROOT, Draft, State, StatelessDrafter, Topology


class PlainDrafter(StatelessDrafter):
    name = "none"
    num_nodes = 1

    def __init__(self, device: torch.device) -> None:
        self._topology = Topology.from_parents([ROOT], device)

    def propose(self, state: State) -> Draft:
        roots_B1 = torch.tensor(state.roots_B, device=self._topology.depths_N.device)[:, None]
        return Draft(roots_B1, [self._topology] * len(state.roots_B))
