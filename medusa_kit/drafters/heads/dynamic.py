"""Heads as a drafter whose tree is grown anew for each row and step, best first.

A static tree has the same ranks in the same slots; here the nodes are the paths that the heads find
most probable now (EAGLE-2, arXiv 2406.16858, §4; tree/dynamic.py). Acceptance does not change, and
the tree depends on committed tokens alone, so decoding stays exact, also when sampling.

Where the heads guess in C++, they grow the tree there as well (infer/cpu/trees.h), the same one.

Nodes are numbered by falling probability, so the tree of N nodes is the first N of any larger one.

Shapes: B batch, N nodes with root, D hidden, K heads, R guesses of a head, Q parents of one depth,
J tokens of their paths, C candidates of all depths so far.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.guesser import GrownTrees
from medusa_kit.heads.scores import scored_guesses, scored_guesses_after
from medusa_kit.infer.draft import (
    ROOT,
    UNUSED,
    Draft,
    State,
    StatelessDrafter,
    Topology,
)
from medusa_kit.infer.transfer import to_device
from medusa_kit.tree.dynamic import DynamicTree, best_first

SHAPES_KEPT = 256

Grown = tuple[Tensor, list[list[int]]]  # tokens_BN, parents of each row


class DynamicDrafter(StatelessDrafter):
    """For all kinds of heads; how a tree is grown depends on whether they read the path."""

    def __init__(self, heads: MedusaHeads, tree: DynamicTree) -> None:
        """Raises TreeError when the tree uses more heads than there are, or more guesses."""
        tree.check_fits(heads.num_heads, heads.num_columns)
        self.name: str = f"{heads.config.told}, dynamic tree"
        self.heads, self.tree = heads, tree
        self.num_nodes = tree.num_nodes
        self._shapes: dict[tuple[int, ...], Topology] = {}
        self._tree_of = lru_cache(lambda num_nodes: replace(tree, num_nodes=num_nodes))

    def propose(self, state: State) -> Draft:
        return self._draft(state, self.tree)

    def propose_nodes(self, state: State, nodes: Sequence[int]) -> Draft:
        """The tree of the root and as many nodes, at least one: the first ones of the whole."""
        return self._draft(state, self._tree_of(1 + len(nodes)))

    def grow(self, hidden_BD: Tensor, roots_B: Sequence[int]) -> Grown:
        """(tokens_BN, parents of each row). Slots without a path are UNUSED."""
        trees = self._quickly(hidden_BD, roots_B, self.tree)
        if trees is not None:
            return trees.tokens_BN, trees.parents
        return self._through_torch(hidden_BD, roots_B, self.tree)

    def _draft(self, state: State, tree: DynamicTree) -> Draft:
        trees = self._quickly(state.hidden_BD, state.roots_B, tree)
        if trees is not None:
            shapes = [self._topology(trees, row) for row in range(len(trees.parents))]
            return Draft(trees.tokens_BN, shapes)
        tokens_BN, parents = self._through_torch(state.hidden_BD, state.roots_B, tree)
        device = state.hidden_BD.device
        return Draft(tokens_BN, [Topology.from_parents(row, device) for row in parents])

    def _topology(self, trees: GrownTrees, row: int) -> Topology:
        """The same object for the same parents, since small trees have few shapes."""
        parents = tuple(trees.parents[row])
        if (known := self._shapes.get(parents)) is None:
            if len(self._shapes) >= SHAPES_KEPT:
                self._shapes.clear()
            own = Topology(parents, trees.depths_BN[row].clone(), trees.sees_BNN[row].clone())
            known = self._shapes[parents] = own
        return known

    def _quickly(
        self, hidden_BD: Tensor, roots_B: Sequence[int], tree: DynamicTree
    ) -> GrownTrees | None:
        if self.heads.guesser is None:
            return None
        sizes = tree.num_nodes, tree.temperatures[: tree.depth], _count(tree), tree.beam
        return self.heads.guesser.grow(hidden_BD, roots_B, *sizes)

    @torch.inference_mode()
    def _through_torch(self, hidden_BD: Tensor, roots_B: Sequence[int], tree: DynamicTree) -> Grown:
        roots = to_device(roots_B, hidden_BD.device)
        grow = _grow_at_once if self.heads.one_pass else _grow_by_depth
        return grow(self.heads, tree, hidden_BD, roots)


def _count(tree: DynamicTree) -> int:
    """Guesses of a head that can have a place in the tree."""
    return min(tree.num_ranks, tree.num_nodes - 1)


def _grow_at_once(
    heads: MedusaHeads, tree: DynamicTree, hidden_BD: Tensor, roots_B: Tensor
) -> Grown:
    """One pass of the heads, then a heap gives exactly the N - 1 most probable paths."""
    count = _count(tree)
    temperatures = tree.temperatures[: tree.depth]
    ids_KBR, scores_KBR = scored_guesses(heads, hidden_BD, count, temperatures, roots_B)
    ids, parents_BN = ids_KBR.tolist(), []
    tokens_BN = []
    for row, root in enumerate(roots_B.tolist()):
        parents, depths, ranks = best_first(scores_KBR[:, row].tolist(), tree.num_nodes)
        guesses = [ids[d - 1][row][r] for d, r in zip(depths[1:], ranks[1:], strict=True)]
        empty = tree.num_nodes - len(parents)
        tokens_BN.append([root, *guesses, *[root] * empty])
        parents_BN.append(parents + [UNUSED] * empty)
    return to_device(tokens_BN, hidden_BD.device), parents_BN


def _grow_by_depth(
    heads: MedusaHeads, tree: DynamicTree, hidden_BD: Tensor, roots_B: Tensor
) -> Grown:
    """One pass for each depth over the `beam` best nodes of the last one; then the best of all.

    Only nodes that can still have a child in the tree of N go on: the N - 2 best so far. This limit
    saves time and does not change the tree.
    """
    count = _count(tree)
    paths_BQJ, above_BQ = roots_B[:, None, None], torch.zeros_like(roots_B)[:, None].float()
    places_BQ = torch.full_like(roots_B, ROOT)[:, None]  # of the parents, among the candidates
    tokens, scores, parents = list[Tensor](), list[Tensor](), list[Tensor]()
    walk = Walk()
    for k in range(tree.depth):
        hidden_BQD = hidden_BD[:, None].expand(-1, paths_BQJ.shape[1], -1)
        ids_BQR, own_BQR = scored_guesses_after(
            heads, k, hidden_BQD, paths_BQJ, count, tree.temperatures[k], walk
        )
        before = sum(part.shape[1] for part in scores)
        tokens.append(ids_BQR.flatten(1))
        scores.append((above_BQ[..., None] + own_BQR).flatten(1))
        parents.append(places_BQ.repeat_interleave(count, dim=1))
        best_BQ = _worth_a_child(tree, scores)
        if k + 1 == tree.depth or best_BQ.shape[1] == 0:
            break
        above_BQ = scores[-1].gather(1, best_BQ)
        path_of_BQ = best_BQ // count
        walk.follow(path_of_BQ)
        behind_BQJ = paths_BQJ.gather(1, path_of_BQ[..., None].expand(-1, -1, paths_BQJ.shape[2]))
        paths_BQJ = torch.cat([behind_BQJ, tokens[-1].gather(1, best_BQ)[..., None]], dim=2)
        places_BQ = best_BQ + before
    return _cut(tree.num_nodes, roots_B, *(torch.cat(p, dim=1) for p in (tokens, scores, parents)))


def _worth_a_child(tree: DynamicTree, scores: Sequence[Tensor]) -> Tensor:
    """Which candidates of the last depth get children, best first; as many for every row."""
    room = tree.num_nodes - 2  # nodes besides the root and the child itself
    ordered = scores[-1].sort(dim=1, descending=True, stable=True)
    best, values = ordered.indices[:, : min(tree.beam, room)], ordered.values
    all_BC = torch.cat(list(scores), dim=1)
    if not 0 < room < all_BC.shape[1]:
        return best
    least_B1 = all_BC.topk(room, dim=1).values[:, -1:]
    reaching = int((values[:, : best.shape[1]] >= least_B1).sum(1).max())
    return best[:, :reaching]


def _cut(
    num_nodes: int, roots_B: Tensor, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor
) -> Grown:
    """The best num_nodes - 1 candidates; a stable sort keeps parents before equal children."""
    kept_BN = scores_BC.sort(dim=1, descending=True, stable=True).indices[:, : num_nodes - 1]
    B, kept = kept_BN.shape
    # One more column is the root's, at place -1.
    node_of_BC = torch.full((B, scores_BC.shape[1] + 1), UNUSED, device=kept_BN.device)
    node_of_BC[:, ROOT] = 0
    numbers_BN = torch.arange(1, kept + 1, device=kept_BN.device).expand(B, -1)
    node_of_BC.scatter_(1, kept_BN, numbers_BN)
    parents_BN = node_of_BC.gather(1, parents_BC.gather(1, kept_BN) % node_of_BC.shape[1])
    rows = [[ROOT, *row] + [UNUSED] * (num_nodes - 1 - kept) for row in parents_BN.tolist()]
    empty_BN = roots_B[:, None].expand(-1, num_nodes - 1 - kept)
    return torch.cat([roots_B[:, None], tokens_BC.gather(1, kept_BN), empty_BN], dim=1), rows
