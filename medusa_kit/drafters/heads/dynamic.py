"""Heads as a drafter whose tree is grown anew for each row and step, best first.

A static tree has the same ranks in the same slots; here the nodes are the paths that the heads find
most probable now (EAGLE-2, arXiv 2406.16858, §4; tree/dynamic.py). Acceptance does not change, and
the tree depends on committed tokens alone, so decoding stays exact, also when sampling.

Where the heads guess in C++, they grow the tree there as well (infer/cpu/trees.h), the same one.
Where the tree has smoothing, guesses are blended with the row's own text (copying.py), also those
of tokens that will be drawn: the noise counts in the heads' share, not in the text's.

Nodes are numbered by falling probability, so the tree of N nodes is the first N of any larger one.

Shapes: B batch, N nodes with root, D hidden, K heads, R guesses of a head, Q parents of one depth,
J tokens of their paths, C candidates of all depths so far, T tokens of a row's text.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa_kit.drafters.heads.copying import RowText, with_copies, with_copies_after
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.draws import RowsDraws
from medusa_kit.heads.guesser import GrownTrees, Least, Texts
from medusa_kit.heads.scores import scored_guesses, scored_guesses_after
from medusa_kit.infer.draft import (
    ROOT,
    UNUSED,
    Draft,
    Drafter,
    State,
    Topology,
)
from medusa_kit.no_gradients import no_gradients
from medusa_kit.transfer import to_device, together_on_host
from medusa_kit.tree.dynamic import DynamicTree, Guesses, best_first

SHAPES_KEPT = 256
ALL = Least()


class Grown(NamedTuple):
    """Trees of several rows, on the host. Slots without a path are UNUSED."""

    tokens_BN: Tensor
    parents: list[list[int]]  # of each row
    scores_BN: Tensor  # log-probabilities of the paths; 0 in slots without one


class DynamicDrafter(Drafter):
    """For all kinds of heads; how a tree is grown depends on whether they read the path."""

    def __init__(self, heads: MedusaHeads, tree: DynamicTree) -> None:
        """Raises TreeError when the tree uses more heads than there are, or more guesses."""
        tree.check_fits(heads.num_heads, heads.num_columns)
        self.name = f"{heads.config.kind}, dynamic tree"
        self.heads, self.tree = heads, tree
        self.num_nodes = tree.num_nodes
        self._shapes: dict[tuple[int, ...], Topology] = {}

    def propose(self, state: State) -> Draft:
        draws = state.draws()
        texts = self.texts(state)
        trees = self._quickly(state.hidden_BD, state.roots_B, ALL, draws, texts)
        if trees is not None:
            shapes = [self._topology(trees, row) for row in range(len(trees.parents))]
            return Draft(trees.tokens_BN, shapes)
        grown = self._through_torch(state.hidden_BD, state.roots_B, ALL, draws, texts)
        device = state.hidden_BD.device
        shapes = [Topology.from_parents(row, device) for row in grown.parents]
        return Draft(to_device(grown.tokens_BN, device), shapes)

    def texts(self, state: State) -> Texts:
        """What `grow` is to copy from: nothing where the tree has no smoothing."""
        if not self.tree.smoothing:
            return ()
        return [one.own(self, RowText).read(one.text, one.root) for one in state.requests]

    def grow(
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        least: Least = ALL,
        draws: RowsDraws | None = None,
        texts: Texts = (),
    ) -> Grown:
        """The whole tree, or what is likely enough of it. `draws`: of rows whose tokens will be
        drawn (heads/draws.py). `texts`: of each row, its root last."""
        trees = self._quickly(hidden_BD, roots_B, least, draws, texts)
        if trees is not None:
            return Grown(trees.tokens_BN, trees.parents, trees.scores_BN)
        return self._through_torch(hidden_BD, roots_B, least, draws, texts)

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
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        least: Least,
        draws: RowsDraws | None,
        texts: Texts = (),
    ) -> GrownTrees | None:
        if self.heads.guesser is None:
            return None
        tree = self.tree
        sizes = tree.num_nodes, tree.temperatures[: tree.depth], _count(tree), tree.beam
        blending = texts, tree.smoothing
        return self.heads.guesser.grow(hidden_BD, roots_B, *sizes, least, draws, *blending)

    @no_gradients
    def _through_torch(
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        least: Least,
        draws: RowsDraws | None,
        texts: Texts = (),
    ) -> Grown:
        grow = _grow_at_once if self.heads.one_pass else _grow_by_depth
        return grow(self.heads, self.tree, hidden_BD, roots_B, least, draws, texts)


def _count(tree: DynamicTree) -> int:
    """Guesses of a head that can have a place in the tree. The text may move up any of them."""
    return tree.num_ranks if tree.smoothing else min(tree.num_ranks, tree.num_nodes - 1)


def _grow_at_once(
    heads: MedusaHeads,
    tree: DynamicTree,
    hidden_BD: Tensor,
    roots: Sequence[int],
    least: Least,
    draws: RowsDraws | None,
    texts: Texts,
) -> Grown:
    """One pass of the heads, then a heap gives exactly the N - 1 most probable paths."""
    count = _count(tree)
    temperatures = tree.temperatures[: tree.depth]
    found = scored_guesses(heads, hidden_BD, count, temperatures, draws)
    ids_KBC, scores_KBC = together_on_host(*found)
    grown = list[tuple[list[int], list[int], list[float]]]()
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

        grown.append(best_first(root, after, tree.depth, tree.num_nodes, least.kept))
    N = tree.num_nodes
    tokens_BN = [tokens + [tokens[0]] * (N - len(tokens)) for tokens, _, _ in grown]
    parents_BN = [parents + [UNUSED] * (N - len(parents)) for _, parents, _ in grown]
    scores_BN = [scores + [0.0] * (N - len(scores)) for _, _, scores in grown]
    return Grown(torch.tensor(tokens_BN), parents_BN, torch.tensor(scores_BN, dtype=torch.float32))


def _grow_by_depth(
    heads: MedusaHeads,
    tree: DynamicTree,
    hidden_BD: Tensor,
    roots: Sequence[int],
    least: Least,
    draws: RowsDraws | None,
    texts: Texts,
) -> Grown:
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
        above_BQ = above_BQ.masked_fill(above_BQ < least.asked, -math.inf)
        path_of_BQ = best_BQ // width
        walk.follow(path_of_BQ)
        behind_BQJ = paths_BQJ.gather(1, path_of_BQ[..., None].expand(-1, -1, paths_BQJ.shape[2]))
        paths_BQJ = torch.cat([behind_BQJ, tokens[-1].gather(1, best_BQ)[..., None]], dim=2)
        places_BQ = best_BQ + before
    found = (torch.cat(part, dim=1) for part in (tokens, scores, parents))
    return _cut(tree.num_nodes, least.kept, roots_B, *found)


def _can_have_children(tree: DynamicTree, scores: Sequence[Tensor], least: Least) -> Tensor:
    """Which candidates of the last depth get children, best first; as many for every row."""
    room = tree.num_nodes - 2  # nodes besides the root and the child itself
    ordered = scores[-1].sort(dim=1, descending=True, stable=True)
    best, values = ordered.indices[:, : min(tree.beam, room)], ordered.values
    all_BC = torch.cat(list(scores), dim=1)
    least_B1 = torch.full_like(values[:, :1], least.asked)
    if 0 < room < all_BC.shape[1]:
        least_B1 = all_BC.topk(room, dim=1).values[:, -1:].clamp_min(least.asked)
    if best.device.type != "cpu":  # reading how many there are takes longer than passing them on
        return best
    reaching = int((values[:, : best.shape[1]] >= least_B1).sum(1).max())
    return best[:, :reaching]


def _cut(
    num_nodes: int,
    least: float,
    roots_B: Tensor,
    tokens_BC: Tensor,
    scores_BC: Tensor,
    parents_BC: Tensor,
) -> Grown:
    """The best num_nodes - 1 candidates; a stable sort keeps parents before equal children."""
    ordered = scores_BC.sort(dim=1, descending=True, stable=True)
    kept_BN, scores_BN = ordered.indices[:, : num_nodes - 1], ordered.values[:, : num_nodes - 1]
    unlikely_BN, (B, kept) = (scores_BN < least) | (scores_BN == -math.inf), kept_BN.shape
    # One more column is the root's, at place -1.
    node_of_BC = torch.full((B, scores_BC.shape[1] + 1), UNUSED, device=kept_BN.device)
    node_of_BC[:, ROOT] = 0
    numbers_BN = torch.arange(1, kept + 1, device=kept_BN.device).expand(B, -1)
    node_of_BC.scatter_(1, kept_BN, numbers_BN)
    parents_BN = node_of_BC.gather(1, parents_BC.gather(1, kept_BN) % node_of_BC.shape[1])
    parents_BN.masked_fill_(unlikely_BN, UNUSED)
    empty_BN = roots_B[:, None].expand(-1, num_nodes - 1 - kept)
    tokens_BN = tokens_BC.gather(1, kept_BN).where(~unlikely_BN, roots_B[:, None])
    tokens_BN = torch.cat([roots_B[:, None], tokens_BN, empty_BN], dim=1)
    scores_BN = pad(scores_BN.masked_fill(unlikely_BN, 0.0), (1, num_nodes - 1 - kept))
    tokens_BN, parents_BN, scores_BN = together_on_host(tokens_BN, parents_BN, scores_BN)
    rows = [[ROOT, *row] + [UNUSED] * (num_nodes - 1 - kept) for row in parents_BN.tolist()]
    return Grown(tokens_BN, rows, scores_BN)
