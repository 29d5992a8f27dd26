"""Heads as a drafter: one pass of the heads fills a static tree (Medusa, arXiv 2401.10774, §2.1.2).

The node at depth d with rank r holds the r-th likeliest token of heads[d - 1].

Shapes: B batch, N nodes with root, D hidden, K heads, C candidates of a head.
"""

import torch
from torch import Tensor

from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.draft import Draft, State, StatelessDrafter, Topology
from medusa_kit.infer.transfer import to_device
from medusa_kit.tree.candidate_tree import CandidateTree


class HeadsDrafter(StatelessDrafter):
    """The base class of drafters that fill a static tree with the guesses of heads."""

    def __init__(self, heads: MedusaHeads, tree: CandidateTree) -> None:
        """Raises TreeError when the tree needs more heads, or more guesses, than there are."""
        tree.check_fits(heads.num_heads, heads.num_columns)
        self.name: str = heads.config.told
        self.heads, self.tree = heads, tree
        self.num_nodes = tree.num_nodes
        self.topology = Topology.from_parents(tree.parents, heads.base.device)
        self._parents_N, self._ranks_N = torch.tensor(tree.parents), torch.tensor(tree.ranks)

    def propose(self, state: State) -> Draft:
        tokens_BN, guesser = None, self.heads.guesser
        if guesser is not None and self.num_nodes > 1:
            tree = self._parents_N, self._ranks_N
            tokens_BN = guesser.fill(state.hidden_BD, state.roots_B, *tree)
        if tokens_BN is None:
            tokens_BN = self._through_torch(state)
        return Draft(tokens_BN, [self.topology] * len(state.roots_B))

    @torch.inference_mode()
    def _through_torch(self, state: State) -> Tensor:
        roots_B = to_device(state.roots_B, state.hidden_BD.device)
        return self.fill(state.hidden_BD, roots_B)

    def alike(self, other: object) -> bool:
        """Whether steps built for one also serve the other (`infer/cuda_graph/`)."""
        if type(self) is not type(other):
            return False
        assert isinstance(other, HeadsDrafter)
        return self.heads is other.heads and self.tree == other.tree

    def fill(self, hidden_BD: Tensor, roots_B: Tensor, on_device: bool = False) -> Tensor:
        """tokens_BN of the tree. `on_device`: nothing is read on the host."""
        raise NotImplementedError


class MedusaDrafter(HeadsDrafter):
    """For kinds whose heads all run at once (`medusa`, `rooted`)."""

    def __init__(self, heads: MedusaHeads, tree: CandidateTree) -> None:
        super().__init__(heads, tree)
        device = heads.base.device
        self._head_N = torch.tensor([depth - 1 for depth in tree.depths[1:]], device=device)
        self._rank_N = torch.tensor(tree.ranks[1:], device=device)

    def fill(self, hidden_BD: Tensor, roots_B: Tensor, on_device: bool = False) -> Tensor:
        if self.num_nodes == 1:
            return roots_B[:, None]
        tree = self.tree  # only as many heads run as it is deep
        ids_KBC = self.heads.candidates(hidden_BD, tree.num_ranks, tree.depth, roots_B, on_device)
        guesses_NB = ids_KBC[self._head_N, :, self._rank_N]
        return torch.cat([roots_B[:, None], guesses_NB.T], dim=1)
