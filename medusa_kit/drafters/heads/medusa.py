"""Heads as a drafter: one pass of the heads fills a static tree (Medusa, arXiv 2401.10774, §2.1.2).

The node at depth d with rank r holds the r-th likeliest token of heads[d - 1].

Shapes: B batch, N nodes with root, D hidden, K heads, C candidates of a head.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.draws import RowsDraws
from medusa_kit.heads.scores import guesses
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.forest import Forest
from medusa_kit.no_gradients import no_gradients
from medusa_kit.transfer import to_device
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.shape import ROOT, TreeShape, shape_of

PARTS_KEPT = 256  # of a tree, whose shapes come again and again


class Part(NamedTuple):
    """Some nodes of a tree as a tree of their own."""

    shape: TreeShape
    parents_N: Tensor  # on the host
    ranks_N: Tensor
    nodes_N: Tensor  # of the whole tree, on the device


class HeadsDrafter(Drafter):
    """The base class of drafters that fill a static tree with the draft tokens of heads."""

    def __init__(self, heads: MedusaHeads, tree: CandidateTree) -> None:
        """Raises TreeError when the tree needs more heads, or more draft tokens, than there are."""
        tree.check_fits(heads.num_heads, heads.num_columns)
        self.name = heads.config.kind
        self.heads, self.tree = heads, tree
        self.num_nodes = tree.num_nodes
        self._nodes = tuple(range(1, tree.num_nodes))
        make = partial(_make_part, tree, heads.base.device)
        self._part = lru_cache(maxsize=PARTS_KEPT)(make)

    def propose(self, state: State) -> Forest:
        return self.propose_nodes(state, self._nodes)

    def propose_nodes(self, state: State, nodes: Sequence[int]) -> Forest:
        """The root and these nodes of the tree, in this rising order; parents are among them."""
        part, draws = self._part(tuple(nodes)), state.draws()
        tokens_BN, guesser = None, self.heads.guesser
        if guesser is not None and nodes:
            tree = part.parents_N, part.ranks_N
            tokens_BN = guesser.fill(state.hidden_BD, state.roots_B, *tree, draws)
        if tokens_BN is None:
            tokens_BN = self._through_torch(state, draws)
            if len(nodes) < len(self._nodes):
                tokens_BN = tokens_BN[:, part.nodes_N]
        return Forest(tokens_BN.flatten(), [part.shape] * len(state.roots_B))

    @no_gradients
    def _through_torch(self, state: State, draws: RowsDraws | None) -> Tensor:
        roots_B = to_device(state.roots_B, state.hidden_BD.device)
        return self.fill(state.hidden_BD, roots_B, draws=draws)

    def fill(self, hidden_BD: Tensor, roots_B: Tensor, draws: RowsDraws | None = None) -> Tensor:
        """tokens_BN of the tree. `draws`: of rows whose tokens will be drawn (heads/draws.py)."""
        raise NotImplementedError


def _make_part(tree: CandidateTree, device: torch.device, nodes: tuple[int, ...]) -> Part:
    """No method: a drafter that kept what its own method made would refer to itself, and model and
    parts would wait for Python's search for garbage."""
    kept = [0, *nodes]
    index_of = {node: at for at, node in enumerate(kept)}
    parents = [ROOT, *(index_of[tree.parents[node]] for node in nodes)]
    return Part(
        shape_of(tuple(parents)),
        torch.tensor(parents),
        torch.tensor([tree.ranks[node] for node in kept]),
        to_device(kept, device),
    )


class MedusaDrafter(HeadsDrafter):
    """For `medusa` heads, which all run at once."""

    def __init__(self, heads: MedusaHeads, tree: CandidateTree) -> None:
        super().__init__(heads, tree)
        device = heads.base.device
        self._head_N = torch.tensor([depth - 1 for depth in tree.depths[1:]], device=device)
        self._rank_N = torch.tensor(tree.ranks[1:], device=device)

    def fill(self, hidden_BD: Tensor, roots_B: Tensor, draws: RowsDraws | None = None) -> Tensor:
        if self.num_nodes == 1:
            return roots_B[:, None]
        ranks, depth = self.tree.num_ranks, self.tree.depth  # as many heads run
        ids_KBC = guesses(self.heads, hidden_BD, ranks, depth, draws)
        guesses_NB = ids_KBC[self._head_N, :, self._rank_N]
        return torch.cat([roots_B[:, None], guesses_NB.T], dim=1)
