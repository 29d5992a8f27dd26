"""Heads as a drafter whose tree is grown anew for each row and step, best first.

A static tree has the same ranks in the same slots; here the nodes are the paths that the heads find
most probable now (EAGLE-2, arXiv 2406.16858, §4; tree/dynamic.py). Acceptance does not change, and
the tree depends on committed tokens alone, so decoding stays exact, also when sampling.

Where the heads draft in C++, they grow the tree there as well (infer/cpu/trees.h), the same one.
Where the tree has smoothing, draft tokens are blended with the row's own text (copying.py), also
those of tokens that will be drawn: the noise counts in the heads' share, not in the text's.

Nodes are numbered by falling probability, so the tree of N nodes is the first N of any larger one.

Shapes: B batch, N nodes with root, D hidden, K heads, R draft tokens of a head, Q parents of one
depth, J tokens of their paths, C candidates of all depths so far, T tokens of a row's text.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_kit.drafters.heads.copying import RowText, with_copies, with_copies_after
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.draws import RowsDraws
from medusa_kit.heads.guesser import MinLogProbs, Texts
from medusa_kit.heads.scores import scored_guesses, scored_guesses_after
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.forest import Forest
from medusa_kit.no_gradients import no_gradients
from medusa_kit.transfer import to_device, together_on_host
from medusa_kit.tree.dynamic import DynamicTree, Grown, Guesses, best_first
from medusa_kit.tree.shape import ROOT

ALL = MinLogProbs()


class DynamicDrafter(Drafter):
    """For all kinds of heads; how a tree is grown depends on whether they read the path."""

    def __init__(self, heads: MedusaHeads, tree: DynamicTree) -> None:
        """Raises TreeError when the tree uses more heads than there are, or more draft tokens."""
        tree.check_fits(heads.num_heads, heads.num_columns)
        self.name = f"{heads.config.kind}, dynamic tree"
        self.heads, self.tree = heads, tree
        self.num_nodes = tree.num_nodes

    def propose(self, state: State) -> Forest:
        trees = self.grow(state.hidden_BD, state.roots_B, ALL, state.draws(), self.texts(state))
        tokens, parents, _ = zip(*trees, strict=True)
        return Forest.of(tokens, parents, state.hidden_BD.device)

    def texts(self, state: State) -> Texts:
        """What `grow` is to copy from: nothing where the tree has no smoothing."""
        if not self.tree.smoothing:
            return ()
        return [one.own(self, RowText).read(one.text, one.root) for one in state.requests]

    def grow(
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        least: MinLogProbs = ALL,
        draws: RowsDraws | None = None,
        texts: Texts = (),
    ) -> list[Grown]:
        """The whole tree of each row, or what is likely enough of it. `draws`: of rows whose tokens
        will be drawn (heads/draws.py). `texts`: of each row, its root last."""
        if self.heads.guesser is not None:
            tree = self.tree
            sizes = tree.num_nodes, tree.temperatures[: tree.depth], _count(tree), tree.beam
            blending = texts, tree.smoothing
            trees = self.heads.guesser.grow(hidden_BD, roots_B, *sizes, least, draws, *blending)
            if trees is not None:
                return trees
        return self._through_torch(hidden_BD, roots_B, least, draws, texts)

    @no_gradients
    def _through_torch(
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        least: MinLogProbs,
        draws: RowsDraws | None,
        texts: Texts = (),
    ) -> list[Grown]:
        grow = _grow_at_once if self.heads.one_pass else _grow_by_depth
        return grow(self.heads, self.tree, hidden_BD, roots_B, least, draws, texts)


def _count(tree: DynamicTree) -> int:
    """Draft tokens of a head that can have a place in the tree. The text may move up any of
    them."""
    return tree.num_ranks if tree.smoothing else min(tree.num_ranks, tree.num_nodes - 1)


def _grow_at_once(
    heads: MedusaHeads,
    tree: DynamicTree,
    hidden_BD: Tensor,
    roots: Sequence[int],
    least: MinLogProbs,
    draws: RowsDraws | None,
    texts: Texts,
) -> list[Grown]:
    """One pass of the heads, then a heap gives exactly the N - 1 most probable paths."""
    count = _count(tree)
    temperatures = tree.temperatures[: tree.depth]
    found = scored_guesses(heads, hidden_BD, count, temperatures, draws)
    ids_KBC, scores_KBC = together_on_host(*found)
    grown = list[Grown]()
    for row, root in enumerate(roots):
        text_T = texts[row] if texts else None
        both = zip(ids_KBC[:, row].tolist(), scores_KBC[:, row].tolist(), strict=True)
        of_head = [list(zip(*pair, strict=True)) for pair in both]

        def after(path: Sequence[int], of_head=of_head, text_T=text_T) -> Guesses:  # type: ignore[no-untyped-def]
            guesses = of_head[len(path) - 1]
            if text_T is None:
                return guesses
            blended = with_copies(guesses, text_T, path, tree.smoothing)
            return sorted(blended, key=lambda one: -one[1])

        grown.append(best_first(root, after, tree.depth, tree.num_nodes, least.keep))
    return grown


def _grow_by_depth(
    heads: MedusaHeads,
    tree: DynamicTree,
    hidden_BD: Tensor,
    roots: Sequence[int],
    least: MinLogProbs,
    draws: RowsDraws | None,
    texts: Texts,
) -> list[Grown]:
    """One pass for each depth over the `beam` best nodes of the last one; then the best of all.

    Only nodes that can still have a child in the tree of N go on: the N - 2 best so far. This limit
    saves time and does not change the tree.
    """
    count, roots_B = _count(tree), to_device(roots, hidden_BD.device)
    paths_BQJ, above_BQ = roots_B[:, None, None], torch.zeros_like(roots_B)[:, None].float()
    places_BQ = torch.full_like(roots_B, ROOT)[:, None]  # of the parents, among the candidates
    tokens, scores, parents = list[Tensor](), list[Tensor](), list[Tensor]()
    walk = Walk()
    for k in range(tree.depth):
        hidden_BQD = hidden_BD[:, None].expand(-1, paths_BQJ.shape[1], -1)
        ids_BQR, own_BQR = scored_guesses_after(
            heads, k, hidden_BQD, paths_BQJ, count, tree.temperatures[k], walk, draws
        )
        if texts:
            ids_BQR, own_BQR = with_copies_after(ids_BQR, own_BQR, texts, paths_BQJ, tree.smoothing)
        width = ids_BQR.shape[2]
        before = sum(part.shape[1] for part in scores)
        tokens.append(ids_BQR.flatten(1))
        scores.append((above_BQ[..., None] + own_BQR).flatten(1))
        parents.append(places_BQ.repeat_interleave(width, dim=1))
        best_BQ = _can_have_children(tree, scores, least)
        if k + 1 == tree.depth or best_BQ.shape[1] == 0:
            break
        above_BQ = scores[-1].gather(1, best_BQ)
        above_BQ = above_BQ.masked_fill(above_BQ < least.expand, -math.inf)
        path_of_BQ = best_BQ // width
        walk.follow(path_of_BQ)
        behind_BQJ = paths_BQJ.gather(1, path_of_BQ[..., None].expand(-1, -1, paths_BQJ.shape[2]))
        paths_BQJ = torch.cat([behind_BQJ, tokens[-1].gather(1, best_BQ)[..., None]], dim=2)
        places_BQ = best_BQ + before
    found = (torch.cat(part, dim=1) for part in (tokens, scores, parents))
    return _cut(tree.num_nodes, least.keep, roots, *found)


def _can_have_children(tree: DynamicTree, scores: Sequence[Tensor], least: MinLogProbs) -> Tensor:
    """Which candidates of the last depth get children, best first; as many for every row."""
    room = tree.num_nodes - 2  # nodes besides the root and the child itself
    ordered = scores[-1].sort(dim=1, descending=True, stable=True)
    best, values = ordered.indices[:, : min(tree.beam, room)], ordered.values
    all_BC = torch.cat(list(scores), dim=1)
    least_B1 = torch.full_like(values[:, :1], least.expand)
    if 0 < room < all_BC.shape[1]:
        least_B1 = all_BC.topk(room, dim=1).values[:, -1:].clamp_min(least.expand)
    if best.device.type != "cpu":  # reading how many there are takes longer than passing them on
        return best
    reaching = int((values[:, : best.shape[1]] >= least_B1).sum(1).max())
    return best[:, :reaching]


def _cut(
    num_nodes: int,
    least: float,
    roots: Sequence[int],
    tokens_BC: Tensor,
    scores_BC: Tensor,
    parents_BC: Tensor,
) -> list[Grown]:
    """The best num_nodes - 1 candidates; a stable sort keeps parents before equal children."""
    ordered = scores_BC.sort(dim=1, descending=True, stable=True)
    kept_BN, scores_BN = ordered.indices[:, : num_nodes - 1], ordered.values[:, : num_nodes - 1]
    likely_B = ((scores_BN >= least) & (scores_BN > -math.inf)).sum(1)  # the first of each row
    (B, C), kept, device = scores_BC.shape, kept_BN.shape[1], kept_BN.device
    node_of_BC = torch.zeros(B, C + 1, dtype=torch.int64, device=device)  # the last is the root's
    numbers_BN = torch.arange(1, kept + 1, device=device).expand(B, -1)
    node_of_BC.scatter_(1, kept_BN, numbers_BN)
    parents_BN = node_of_BC.gather(1, parents_BC.gather(1, kept_BN) % (C + 1))
    parts = together_on_host(tokens_BC.gather(1, kept_BN), parents_BN, scores_BN, likely_B)
    rows = zip(roots, *(part.tolist() for part in parts), strict=True)
    return [
        ([root, *tokens[:count]], [ROOT, *parents[:count]], [0.0, *scores[:count]])
        for root, tokens, parents, scores, count in rows
    ]
