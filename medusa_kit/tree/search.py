"""The best candidate tree of N nodes, found by sorting.

At each position exactly one path is true. So a node is worth the share of positions whose ranks
begin with its path, and a tree is worth the sum of its nodes. A child is never worth more than its
parent, so the N most valuable nodes form a tree, and no tree of N nodes is worth more.

Small counts are smoothed as conditionals P(rank | parent path), towards how often the head has that
rank anywhere. The paper ("Medusa", arXiv 2401.10774, §2.3.3) multiplies these head-wide shares
alone; here that is the limit of strong smoothing.

Steps start where the last one failed, which is harder than the average position, so values over all
positions are too optimistic. Trees are therefore judged by replay, on held-out answers if given.

Shapes: P positions, K heads, N nodes with root, R ranks.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree, Path
from medusa_kit.tree.replay import replay
from medusa_kit.tree.statistics import RankStatistics

SMOOTHINGS = (0.0, 4.0, 16.0, 64.0, 256.0)


@dataclass(frozen=True)
class SearchResult:
    """The best tree found for one number of nodes.

    promised_length   1 + the sum of the node values: the acceptance length if steps started at
                      positions weighted as in the search
    replayed_length   acceptance length by replay; the number to trust
    method            how the tree was found, in words
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
    the best tree of N nodes, for any N. Fewer are returned when heads and ranks allow no more.
    `smoothing`: how many positions the head-wide share counts for beside a path's own.

    Raises TreeError for max_nodes < 1, no positions, or weights that are not P numbers >= 0 with a
    sum above 0.
    """
    weights_P = _checked_weights(weights_P, statistics)
    if max_nodes < 1 or not 0.0 <= smoothing < math.inf:
        raise TreeError(
            f"a search for {max_nodes} nodes with smoothing {smoothing}, "
            "expected at least 1 node, the root, and a finite smoothing >= 0"
        )
    ranked = list(islice(_by_falling_value(statistics, weights_P, smoothing), max_nodes - 1))
    return [path for path, _ in ranked], [value for _, value in ranked]


def _by_falling_value(
    statistics: RankStatistics, weights_P: np.ndarray, smoothing: float
) -> Iterator[tuple[Path, float]]:
    """All paths and their values, most valuable first; only yielded paths are expanded.

    Rows are sorted by their ranks, so the rows that begin with a path are consecutive, and their
    weight is the difference of two running sums.
    """
    order_P = statistics.sorted_rows
    ranks_KP = np.ascontiguousarray(statistics.ranks_PK[order_P].T)
    sums_P = np.concatenate([[0.0], np.cumsum(weights_P[order_P])])
    marginals_KR = statistics.marginals(weights_P)
    # A path's rows run from `low` to `high`.
    heap: list[tuple[float, int, Path, int, int]] = [(-1.0, 0, (), 0, statistics.num_positions)]
    while heap:
        negative_value, depth, path, low, high = heapq.heappop(heap)
        if path:
            yield path, -negative_value
        if depth == statistics.num_heads:
            continue
        marginal_R = marginals_KR[depth]
        ranks = np.arange(len(marginal_R) + 1, dtype=np.int16)
        bounds = low + np.searchsorted(ranks_KP[depth, low:high], ranks)
        counts_R, total = np.diff(sums_P[bounds]), sums_P[high] - sums_P[low]
        shares_R = _smoothed(counts_R, total, smoothing, marginal_R)
        cuts = bounds.tolist()
        for rank, share in enumerate(shares_R.tolist()):
            child = (*path, rank)
            entry = (negative_value * share, depth + 1, child, cuts[rank], cuts[rank + 1])
            heapq.heappush(heap, entry)


def _smoothed(
    counts_R: np.ndarray, total: float, smoothing: float, marginal_R: np.ndarray
) -> np.ndarray:
    """float64 [R]: smoothed P(rank | parent path), from the weights of its rows by next rank.

    Rows whose answer has ended or whose token was not found count in the total: nothing can be
    accepted there.
    """
    if total + smoothing == 0.0:
        return np.zeros(len(marginal_R))
    # Sums in another order may differ in the last digit; a child must still not exceed its parent.
    return np.minimum((counts_R + smoothing * marginal_R) / (total + smoothing), 1.0)


def best_trees(
    statistics: RankStatistics,
    sizes: Sequence[int],
    held_out: RankStatistics | None = None,
    rounds: int = 8,
) -> dict[int, SearchResult]:
    """For each number of nodes in `sizes` (root included), the tree that replays longest.

    Trees are searched on `statistics` and judged by replay on `held_out` (without it, on
    `statistics` itself, which is too optimistic). First all positions weigh the same, under each of
    SMOOTHINGS. Then, with the best smoothing, only the positions at which steps of the last tree
    start have weight, at most `rounds` times. This second part is a heuristic and may cycle.

    Raises TreeError when `sizes` is empty, a size is below 1 or beyond all the paths of these heads
    and ranks, or there are no positions.
    """
    judge = statistics if held_out is None else held_out
    _check_sizes(sizes, statistics)
    if judge.num_positions == 0:
        raise TreeError("held-out statistics hold no token", hint="hold out more answers")
    ranked = {s: ranked_paths(statistics, max(sizes), smoothing=s) for s in SMOOTHINGS}
    best = {}
    for size in sorted(set(sizes)):
        uniform = {
            s: _judged(
                paths[: size - 1], values[: size - 1], judge, f"all positions, smoothing {s:g}"
            )
            for s, (paths, values) in ranked.items()
        }
        smoothing = max(uniform, key=lambda s: uniform[s].replayed_length)
        first = uniform[smoothing]
        others = _reweighted(first.tree, statistics, judge, smoothing, rounds)
        # max keeps the earlier, simpler candidate on a tie.
        best[size] = max([first, *others], key=lambda result: result.replayed_length)
    return best


def _reweighted(
    tree: CandidateTree,
    statistics: RankStatistics,
    judge: RankStatistics,
    smoothing: float,
    rounds: int,
) -> Iterator[SearchResult]:
    """Search again where steps of the last tree start, until a tree repeats."""
    seen = {tree}
    for number in range(1, rounds + 1):
        visits_P = replay(tree, statistics).starts_P
        if not visits_P.any():
            return
        paths, values = ranked_paths(statistics, tree.num_nodes, visits_P, smoothing)
        method = f"visited positions, round {number}, smoothing {smoothing:g}"
        result = _judged(paths, values, judge, method)
        tree = result.tree
        if tree in seen:
            return
        seen.add(tree)
        yield result


def _judged(
    paths: list[Path], values: list[float], judge: RankStatistics, method: str
) -> SearchResult:
    tree = CandidateTree(tuple(paths))
    value_of = dict(zip(paths, values, strict=True))
    return SearchResult(
        tree=tree,
        promised_length=1.0 + math.fsum(values),
        replayed_length=replay(tree, judge).acceptance_length,
        method=method if paths else "plain decoding",
        values_N=(1.0, *(value_of[path] for path in tree.paths)),
    )


def _check_sizes(sizes: Sequence[int], statistics: RankStatistics) -> None:
    if not sizes:
        raise TreeError("no tree sizes to search, expected at least one number of nodes")
    heads, ranks = statistics.num_heads, statistics.num_ranks
    max_nodes = 1 + sum(ranks**depth for depth in range(1, heads + 1))
    for size in sizes:
        if not 1 <= size <= max_nodes:
            raise TreeError(
                f"a tree of {size} nodes cannot exist; expected 1 to {max_nodes} "
                f"({heads} heads with {ranks} ranks, and the root)"
            )


def _checked_weights(weights_P: np.ndarray | None, statistics: RankStatistics) -> np.ndarray:
    num_positions = statistics.num_positions
    if num_positions == 0:
        raise TreeError(
            "statistics hold no token to search a tree from",
            hint="calibrate on at least one answer",
        )
    if weights_P is None:
        return np.ones(num_positions)
    weights_P = np.asarray(weights_P, dtype=np.float64)
    if weights_P.shape != (num_positions,):
        raise TreeError(f"weights have shape {weights_P.shape}, expected ({num_positions},)")
    total = weights_P.sum()
    if not (0.0 < total < math.inf and weights_P.min() >= 0.0):
        raise TreeError(f"weights sum to {total}, expected numbers >= 0 with a sum above 0")
    return weights_P
