"""Token recycling (arXiv 2408.08696): the likeliest next tokens of every node are kept for later.

Each verified node, accepted or not, shows which tokens the base model finds likely after the
node's token; the latest are kept in a table for all requests of an engine. A draft follows the
table from the root on. The tree has the N likeliest paths, found best first, if the token of rank r
is right with RANK_CHANCES[r] whatever comes before it. Where the table is full this is the same
tree at each step.

Shapes: B batch, N nodes with root, V vocabulary, R ranks, G groups of M tokens.
"""

import heapq
from itertools import pairwise

import torch
from torch import Tensor

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.drafter import RequestText, State, StepResult
from medusa_kit.infer.likeliest import NO_TOKEN
from medusa_kit.settings.drafters import RecyclingOptions
from medusa_kit.tree.draft_tree import DraftTree

# How often the table's r-th token was the next one, measured on SmolLM2-135M's answers; the last
# number is for all higher ranks.
RANK_CHANCES = (0.4, 0.11, 0.05, 0.035, 0.03, 0.02, 0.01, 0.005)
GROUP = 64  # tokens in a group, evenly spread over the vocabulary
Table = dict[int, list[int]]  # token -> likeliest next tokens, likeliest first
Waiting = tuple[float, int, int, int]  # -path chance, parent, rank, token


class RecyclingDrafter(TreeDrafter):
    name = "recycling"
    rewinds = True  # a draft token depends on the root alone, so drafts may be taken back

    def __init__(self, options: RecyclingOptions, table: Table, device: torch.device) -> None:
        super().__init__(device)
        self.options, self.table, self.num_nodes = options, table, options.num_nodes
        self.num_ranks = options.width

    def begin(self, request: RequestText) -> None:
        """Enter what followed each token of the prompt, since prompts have no logits here."""
        for token, following in pairwise([*request.text, request.root]):
            others = [t for t in self.table.get(token, ()) if t != following]
            self.table[token] = [following, *others][: self.options.width]

    def guess(self, state: State) -> list[DraftTree]:
        return [self._grow(root) for root in state.roots_B]

    def observe(self, step: StepResult) -> None:
        for tree in step.trees:
            ranks_NR = _ranked(tree, self.options.width).tolist()
            # Accepted nodes last, so that they prevail.
            for node in [*range(len(tree.tokens)), 0, *tree.path]:
                if ranks_NR[node][0] != NO_TOKEN:
                    self.table[tree.tokens[node]] = ranks_NR[node]

    def _grow(self, root: int) -> DraftTree:
        tree, depths = DraftTree(root), [0]
        queue: list[Waiting] = []
        self._push(queue, 0, root, 0, 1.0)
        while queue and tree.num_nodes < self.num_nodes:
            negative, parent, rank, token = heapq.heappop(queue)
            if -negative < self._min_chance:
                break
            depths.append(depths[parent] + 1)
            key = (self.name, rank, min(depths[-1], 4))
            chance = _chance(rank)
            node = tree.add(parent, token, chance, key)
            self._push(queue, node, token, 0, -negative)
            self._push(queue, parent, tree.tokens[parent], rank + 1, -negative / chance)
        return tree

    def _push(
        self,
        queue: list[tuple[float, int, int, int]],
        node: int,
        token: int,
        rank: int,
        path: float,
    ) -> None:
        """Queue the draft token of this rank after `node`; the next rank is queued once it is
        taken."""
        following = self.table.get(token, ())
        if rank < len(following):
            heapq.heappush(queue, (-path * _chance(rank), node, rank, following[rank]))


def _ranked(tree: ScoredTree, count: int) -> Tensor:
    """ids_NR of the `count` likeliest tokens after each node."""
    known_NR, most = tree.ranked_NR, tree.logits_NV.shape[-1]
    if known_NR is not None and known_NR.shape[-1] >= min(count, most):
        return known_NR[..., :count]
    return likeliest(tree.logits_NV, count)


def likeliest(logits_XV: Tensor, count: int) -> Tensor:
    """The `count` likeliest tokens, likeliest first: ids_XR; NO_TOKEN where the highest logit is
    not finite.

    They are in the groups with the largest maxima; searching these takes a quarter of topk's time
    on a CPU.
    """
    V = logits_XV.shape[-1]
    num_groups = V // GROUP
    count, whole = min(count, V), num_groups * GROUP
    device = logits_XV.device
    maxima_XG = _maxima(logits_XV[..., :whole].unflatten(-1, (GROUP, num_groups)))
    groups = maxima_XG.topk(min(count, num_groups), dim=-1).indices
    members = torch.arange(0, whole, max(num_groups, 1), device=device)
    inside = (groups[..., None] + members).flatten(-2)
    rest = torch.arange(whole, V, device=device).expand(*inside.shape[:-1], -1)
    ids_XC = torch.cat([inside, rest], dim=-1)
    best = logits_XV.gather(-1, ids_XC).topk(count, dim=-1)
    unknown_X1 = ~best.values[..., :1].isfinite()
    return ids_XC.gather(-1, best.indices).masked_fill(unknown_X1, NO_TOKEN)


def _maxima(logits_XMG: Tensor) -> Tensor:
    """The largest of each group, [X, G]. On a CPU by numpy, since waking torch's threads takes
    milliseconds on a busy machine."""
    if logits_XMG.device.type == "cpu" and logits_XMG.dtype == torch.float32:
        return torch.from_numpy(logits_XMG.numpy().max(-2))
    return logits_XMG.amax(-2)


def _chance(rank: int) -> float:
    return RANK_CHANCES[min(rank, len(RANK_CHANCES) - 1)]


def build(context: DraftContext, options: RecyclingOptions) -> RecyclingDrafter:
    table = context.memory.learned.remembered(("recycling", options.width), Table)
    return RecyclingDrafter(options, table, context.device)
