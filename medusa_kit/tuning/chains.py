"""Chains in a tree's place, for models that carry a state (infer/chains/).

After a rejection what was accepted is read again in front of the next chain. Replay says how much
that is, and steps are timed with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from medusa_kit.engine.engine import Engine
from medusa_kit.infer.chains.verifier import MAX_UNREAD
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import PlannedTree, Tree
from medusa_kit.tree.replay import replay
from medusa_kit.tree.search import SearchResult
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning.step_time import measure_step_times


@dataclass(frozen=True)
class Unread:
    """The average step's tokens in front of its chain, and forwards for such tokens alone."""

    tokens: float
    forwards: float


def chain_of(tree: CandidateTree) -> CandidateTree:
    """The chain that is verified of a tree."""
    return PlannedTree(1, tree).as_chain().static


def chains(sizes: Sequence[int], held_out: RankStatistics) -> dict[int, SearchResult]:
    """A chain for each number of nodes that there are heads for."""
    results = {}
    for size in sizes:
        if size <= held_out.num_heads + 1:
            tree = CandidateTree.chain(size - 1)
            length = replay(tree, held_out).acceptance_length
            results[size] = SearchResult(tree, float("nan"), length, "chain", ())
    return results


def unread_by_replay(tree: CandidateTree, statistics: RankStatistics) -> Unread:
    """The tokens that stay unread where every step drafts this chain."""
    starts = np.flatnonzero(replay(tree, statistics).starts_P).tolist()
    begins = set(statistics.starts.tolist())
    unread = tokens = forwards = 0
    for row, later in pairwise(starts):
        unread = 0 if row in begins else unread
        if unread > MAX_UNREAD:
            forwards, unread = forwards + 1, 0
        tokens += unread
        emitted = later - row
        unread = 0 if emitted == tree.num_nodes else unread + emitted
    steps = max(len(starts) - 1, 1)
    return Unread(tokens / steps, forwards / steps)


def chain_step_times(
    engine: Engine, trees: Mapping[Any, Tree], statistics: RankStatistics, batch_size: int
) -> dict[Any, float]:
    """Seconds of a step for each chain, as `measure_step_times`, with what it leaves unread.

    A step's time is taken as linear in the tokens that it reads, between none unread and the most.
    """
    none = measure_step_times(engine, trees, batch_size=batch_size)
    if len(trees) == 1:
        return none
    with_most = measure_step_times(engine, trees, batch_size=batch_size, num_unread=MAX_UNREAD)
    alone = min(seconds for key, seconds in with_most.items() if trees[key].num_nodes > 1)
    times = dict(none)
    for key, tree in trees.items():
        if tree.num_nodes > 1:
            assert isinstance(tree, CandidateTree)
            unread = unread_by_replay(tree, statistics)
            more = max(with_most[key] - none[key], 0.0) * unread.tokens / MAX_UNREAD
            times[key] = none[key] + more + alone * unread.forwards
    return times
