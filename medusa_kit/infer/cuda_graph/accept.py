"""Greedy acceptance for all rows at once, on the device: it finds the same path as `accept`.

A node is accepted if each token of its path is what the base model names after the one before.
Siblings hold different tokens, so the accepted nodes are one path, known by its deepest node.

Shapes: B batch, N nodes with root, J nodes of the longest path, root included, D hidden, X any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_kit.infer.draft import Topology, path_to


@dataclass(frozen=True)
class TreeTables:
    """What acceptance reads of a static tree. `paths_NJ`: the nodes from the root to each node,
    filled up with j at place j, which moves nothing."""

    depths_N: Tensor
    sees_NN: Tensor
    parents_N: Tensor  # the root's own parent is itself
    paths_NJ: Tensor

    @classmethod
    def of(cls, tree: Topology) -> "TreeTables":
        device = tree.depths_N.device
        paths = [path_to(node, tree.parents) for node in range(len(tree.parents))]
        J = max(len(path) for path in paths)
        filled = [path + list(range(len(path), J)) for path in paths]
        parents = torch.tensor([max(parent, 0) for parent in tree.parents], device=device)
        return cls(tree.depths_N, tree.sees_NN, parents, torch.tensor(filled, device=device))

    @property
    def longest(self) -> int:
        return self.paths_NJ.shape[1]


@dataclass(frozen=True)
class Accepted:
    """`last_B`: deepest accepted node. `nodes_BJ`: its path. `counts_B`: accepted nodes, root
    included, which is also the number of tokens emitted. `roots_B`: the next roots. `emitted_BJ`:
    the tokens after the old root up to the next root; the rest has no meaning."""

    last_B: Tensor
    nodes_BJ: Tensor
    counts_B: Tensor
    roots_B: Tensor
    emitted_BJ: Tensor

    def last_hidden(self, hidden_BND: Tensor) -> Tensor:
        """hidden_BD at the deepest accepted nodes."""
        return at_nodes(hidden_BND, self.last_B[:, None])[:, 0]


def at_nodes(values_BNX: Tensor, nodes_BJ: Tensor) -> Tensor:
    """[B, J, X], what lies at these nodes."""
    return values_BNX.gather(1, nodes_BJ[:, :, None].expand(-1, -1, values_BNX.shape[-1]))


def accept_greedy(
    tree: TreeTables, tokens_BN: Tensor, likeliest_BN: Tensor, max_depth_B: Tensor
) -> Accepted:
    """`likeliest_BN`: what the base model names after each node. Nodes deeper than `max_depth_B`
    lie past the context's end."""
    named_BN = likeliest_BN[:, tree.parents_N]
    holds_BN = (tokens_BN == named_BN) | (tree.depths_N == 0)
    path_holds_BN = (holds_BN[:, None] | ~tree.sees_NN).all(-1)
    fits_BN = path_holds_BN & (tree.depths_N <= max_depth_B[:, None])
    last_B = torch.where(fits_BN, tree.depths_N, -1).argmax(1)
    nodes_BJ = tree.paths_NJ[last_B]
    roots_B1 = likeliest_BN.gather(1, last_B[:, None])
    places_J = torch.arange(tree.longest, device=tokens_BN.device)
    next_BJ = tokens_BN.gather(1, nodes_BJ).roll(-1, dims=1)
    depth_B1 = tree.depths_N[last_B][:, None]
    emitted_BJ = torch.where(places_J == depth_B1, roots_B1, next_BJ)
    return Accepted(last_B, nodes_BJ, depth_B1[:, 0] + 1, roots_B1[:, 0], emitted_BJ)


def walked(emitted_and_count: Sequence[int]) -> list[int]:
    """The emitted tokens of one row, from what a step returns: tokens, then their count."""
    *tokens, count = emitted_and_count
    return list(tokens[:count])
