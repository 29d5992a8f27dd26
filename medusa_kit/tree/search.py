"""The best candidate tree of N nodes, found by sorting.

Exactly one path is true at a position, so a node is worth the share of positions whose ranks begin
with its path, and a tree is worth the sum of its nodes. A child is never worth more than its
parent: the N most valuable nodes are a tree, and no tree of N nodes is worth more.

Thin counts are smoothed as conditionals P(rank | parent path), towards how often the head has that
rank anywhere. The paper ("Medusa", arXiv 2401.10774, §2.3.3) multiplies these head-wide shares
alone; here that is the limit of strong smoothing.

Steps start where the last one failed, which is harder than the average position, so values over all
positions promise too much. Trees are therefore judged by replay, on held-out answers if given.

Shapes: P positions, K heads, N nodes with root, R ranks.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree, Path
from medusa_kit.tree.replay import replay
from medusa_kit.tree.statistics import RankStatistics

SMOOTHINGS = (0.0, 4.0, 16.0, 64.0, 256.0)


@dataclass(frozen=True)
class SearchResult:
    """The best tree found for one number of nodes.

    promised_length   1 + the sum of the node values: acceptance length if steps started at
                      positions weighted as in the search
    replayed_length   acceptance length by replay; the number to trust
    method            how the tree was found, for people
    values_N          value of each node in the tree's order, 1.0 for the root
    """

    tree: CandidateTree
    promised_length: float
    replayed_length: float
    method: str
    values_N: tuple[float, ...]


def ranked_paths(
    statistics: RankStatistics,
    max_nodes: int,
    weights_P: np.ndarray | None = None,
    smoothing: float = 0.0,
) -> tuple[list[Path], list[float]]:
    """The max_nodes - 1 most valuable paths by falling value, and their values (0 to 1).

    Ties go to the smaller (depth, path), and every path follows its parent, so the first N - 1 are
    the best tree of N nodes, for any N. Fewer come back when the heads and ranks allow no more.
    `smoothing` is how many positions the head-wide share weighs against a path's own count.

    Raises TreeError for max_nodes < 1, no positions, or weights that are not P numbers >= 0 with a
    sum above 0.
    """
    _check_nodes(max_nodes)
    weights_P = _checked_weights(weights_P, statistics)
    marginals_KR = statistics.marginals(weights_P)
    paths: list[Path] = []
    values: list[float] = []
    # (-value, depth, path, row numbers of the parent, its child counts): pops most valuable first.
    # The path is unique, so the comparison never gets to the arrays.
    heap: list[tuple[float, int, Path, np.ndarray]] = []
    path, value, rows = (), 1.0, np.arange(statistics.num_positions)
    while len(paths) < max_nodes - 1:
        depth = len(path)
        if depth < statistics.num_heads:
            ranks = statistics.ranks_PK[rows, depth]
            counts_R = _counts(ranks, weights_P[rows], statistics.num_ranks)
            parent_count = weights_P[rows].sum()
    return paths, values
