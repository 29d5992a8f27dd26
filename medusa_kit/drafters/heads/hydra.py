"""Heads that read the path as a drafter: one small pass for each depth (Hydra, arXiv 2402.05109,
§3).

The node at depth d with rank r holds the r-th likeliest token of heads[d - 1] after its parent's
path; all parents of one depth go through the head together.

Shapes: B batch, N nodes with root, D hidden, Q parents of one depth, J tokens of their paths,
C candidates of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_kit.drafters.heads.medusa import HeadsDrafter
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.draws import RowsDraws
from medusa_kit.heads.scores import guesses_after
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.shape import path_to


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, and where their tokens come from."""

    nodes: Tensor
    paths_QJ: Tensor  # nodes from the root to each parent
    above_Q: Tensor  # row of the last depth's paths that each of these continues
    parent_of_node: Tensor  # row of paths_QJ
    rank_of_node: Tensor
    num_ranks: int


class HydraDrafter(HeadsDrafter):
    """For kinds whose heads read the path (`hydra`, `recurrent`)."""

    def __init__(self, heads: MedusaHeads, tree: CandidateTree) -> None:
        super().__init__(heads, tree)
        device = heads.base.device
        self._levels = [_level(tree, depth, device) for depth in range(1, tree.depth + 1)]

    def fill(self, hidden_BD: Tensor, roots_B: Tensor, draws: RowsDraws | None = None) -> Tensor:
        tokens_BN, walk = roots_B[:, None].repeat(1, self.num_nodes), Walk()
        for k, level in enumerate(self._levels):
            path_BQJ = tokens_BN[:, level.paths_QJ]
            hidden_BQD = hidden_BD[:, None].expand(-1, len(level.paths_QJ), -1)
            walk.follow(level.above_Q)
            ids_BQC = guesses_after(
                self.heads, k, hidden_BQD, path_BQJ, level.num_ranks, walk, draws
            )
            tokens_BN[:, level.nodes] = ids_BQC[:, level.parent_of_node, level.rank_of_node]
        return tokens_BN


def _level(tree: CandidateTree, depth: int, device: torch.device) -> Level:
    nodes, parents = _nodes_and_parents(tree, depth)
    before = _nodes_and_parents(tree, depth - 1)[1]
    above = [before.index(tree.parents[parent]) for parent in parents]
    ranks = [tree.ranks[node] for node in nodes]
    return Level(
        torch.tensor(nodes, device=device),
        torch.tensor([path_to(parent, tree.parents) for parent in parents], device=device),
        torch.tensor(above, device=device),
        torch.tensor([parents.index(tree.parents[node]) for node in nodes], device=device),
        torch.tensor(ranks, device=device),
        max(ranks) + 1,
    )


def _nodes_and_parents(tree: CandidateTree, depth: int) -> tuple[list[int], list[int]]:
    """The nodes of a depth, and the nodes that have children there."""
    nodes = [node for node, d in enumerate(tree.depths) if d == depth]
    return nodes, sorted({tree.parents[node] for node in nodes})
