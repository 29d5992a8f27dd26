"""Decoding with a tree, replayed on rank statistics instead of the model.

A draft token is accepted exactly where its head had the true token at that rank, so the ranks alone
say how far each step goes: start at an answer's first row, look up how deep the tree follows the
ranks there, skip the accepted tokens and the next root, repeat. On the same text the number of
steps is that of real greedy decoding.

Shapes: P positions (rows of all answers), K heads, N nodes with root, R ranks, A answers.
"""

from dataclasses import dataclass

import numpy as np

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import Tree
from medusa_kit.tree.statistics import RankStatistics


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """The outcome of decoding every answer with the tree.

    acceptance_length     (tokens emitted - 1) / verify forwards, over all answers; 1.0 when no
                          answer needs a forward
    num_steps             verify forwards
    tokens                tokens emitted, the first one of each answer (from prefill) included
    steps_by_depth        steps whose accepted path has exactly d nodes, d from 0 to tree.depth
    acceptance_by_depth   share of steps that reach at least depth d, d from 1
    starts_P              bool, rows at which a step starts

    1 + sum(acceptance_by_depth) exceeds acceptance_length by at most one token an answer: a path
    accepted up to the very last token leaves no next root to emit.
    """

    acceptance_length: float
    num_steps: int
    tokens: int
    steps_by_depth: list[int]
    acceptance_by_depth: list[float]
    starts_P: np.ndarray


def replay(tree: CandidateTree, statistics: RankStatistics) -> ReplayResult:
    """Decode every answer of `statistics` with `tree`.

    Raises TreeError when the tree is deeper than there are heads in the statistics, or uses ranks
    that they do not hold.
    """
    tree.check_fits(statistics.num_heads, statistics.num_ranks)
    return _replay_depths(_accepted_depths(tree, statistics.ranks_PK), tree.depth, statistics)


def replay_dynamic(num_nodes: int, statistics: RankStatistics) -> ReplayResult:
    """Decode every answer with the dynamic trees of `num_nodes` nodes recorded in `statistics`.

    Raises TreeError when none are recorded.
    """
    if statistics.entries_PK is None:
        raise TreeError(
            "these statistics hold no dynamic trees",
            hint="calibrate again: give `medusa-kit tree-search` answers or prompts",
        )
    depths_P = (statistics.entries_PK <= num_nodes).sum(1)
    return _replay_depths(depths_P, min(num_nodes - 1, statistics.num_heads), statistics)


def node_shares(tree: Tree, statistics: RankStatistics) -> list[float]:
    """How many of the steps accept each node, the root included, where every step drafts `tree`.

    A dynamic tree's nodes are in their own order, by falling probability. Raises what the replay
    of such a tree does.
    """
    if isinstance(tree, CandidateTree):
        starts_P = replay(tree, statistics).starts_P
        accepted_NP = _accepted_nodes(tree, statistics.ranks_PK[starts_P])
    else:
        starts_P = replay_dynamic(tree.num_nodes, statistics).starts_P
        assert statistics.entries_PK is not None
        entries_PK = statistics.entries_PK[starts_P]
        grown = range(2, tree.num_nodes + 1)
        accepted_NP = [np.ones(len(entries_PK), dtype=bool)]
        accepted_NP += [(entries_PK == node).any(1) for node in grown]
    return [float(share_P.mean()) if len(share_P) else 0.0 for share_P in accepted_NP]


def _accepted_nodes(tree: CandidateTree, ranks_PK: np.ndarray) -> list[np.ndarray]:
    """The rows at which each node and all of its path are right."""
    accepted_NP = [np.ones(len(ranks_PK), dtype=bool)]
    for node in range(1, tree.num_nodes):
        at_head = ranks_PK[:, tree.depths[node] - 1] == tree.ranks[node]
        accepted_NP.append(accepted_NP[tree.parents[node]] & at_head)
    return accepted_NP


def _replay_depths(depths_P: np.ndarray, depth: int, statistics: RankStatistics) -> ReplayResult:
    """depths_P: how many nodes a step that starts at each row accepts, `depth` at most."""
    starts_P = _step_starts(depths_P, statistics)
    num_steps = int(starts_P.sum())
    tokens = statistics.num_positions
    steps_by_depth = np.bincount(depths_P[starts_P], minlength=depth + 1)
    reached = np.cumsum(steps_by_depth[::-1])[::-1][1:]
    return ReplayResult(
        acceptance_length=(tokens - statistics.num_answers) / num_steps if num_steps else 1.0,
        num_steps=num_steps,
        tokens=tokens,
        steps_by_depth=steps_by_depth.tolist(),
        acceptance_by_depth=(reached / max(num_steps, 1)).tolist(),
        starts_P=starts_P,
    )


def _accepted_depths(tree: CandidateTree, ranks_PK: np.ndarray) -> np.ndarray:
    """int64 [P]: length of the longest path of the tree that the ranks at each row begin with."""
    # An extra node for "off the tree" and an extra rank for "not in the tree" make tests needless.
    off, other = tree.num_nodes, tree.num_ranks
    child_NR = np.full((tree.num_nodes, tree.num_ranks + 1), off)
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        if parent >= 0:
            child_NR[parent, rank] = node
    depths_P = np.zeros(len(ranks_PK), dtype=np.int64)
    rows, nodes = np.arange(len(ranks_PK)), np.zeros(len(ranks_PK), dtype=np.int64)
    for k in range(tree.depth):
        # As an unsigned number NOT_AVAILABLE is above every rank, as MISSING is.
        ranks = np.minimum(ranks_PK[rows, k].view(np.uint16), other)
        nodes = child_NR[nodes, ranks]
        in_tree = nodes != off
        rows, nodes = rows[in_tree], nodes[in_tree]
        depths_P[rows] = k + 1
    return depths_P


def _step_starts(depths_P: np.ndarray, statistics: RankStatistics) -> np.ndarray:
    """bool [P]: rows at which a step starts, all answers advancing together."""
    starts_P = np.zeros(statistics.num_positions, dtype=bool)
    # An answer's last token needs no forward of its own.
    last_A = statistics.starts + statistics.lengths() - 1
    row_A = statistics.starts
    while len(row_A):
        going_A = row_A < last_A
        row_A, last_A = row_A[going_A], last_A[going_A]
        starts_P[row_A] = True
        row_A = row_A + 1 + depths_P[row_A]
    return starts_P
