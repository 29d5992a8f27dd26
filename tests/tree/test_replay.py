import numpy as np
import pytest
from support.rank_tables import random_statistics

from medusa_kit.errors import TreeError
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tree.replay import node_shares, replay
from medusa_kit.tree.statistics import RankStatistics

BUSHY = CandidateTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 2)))


def walked(tree: CandidateTree, statistics: RankStatistics) -> tuple[list[int], list[int]]:
    """(rows at which a step starts, depth each reaches): one answer and one node at a time."""
    rows, depths = [], []
    ends = [*statistics.starts[1:].tolist(), statistics.num_positions]
    for start, end in zip(statistics.starts.tolist(), ends, strict=True):
        row = start
        while row + 1 < end:
            ranks = tuple(statistics.ranks_PK[row].tolist())
            depth = 0
            while depth < len(ranks) and ranks[: depth + 1] in set(tree.paths):
                depth += 1
            rows.append(row)
            depths.append(depth)
            row += 1 + depth
    return rows, depths


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tree", [BUSHY, CandidateTree.chain(2), CandidateTree.root_only()])
def test_replay_equals_walking(seed, tree):
    lengths = np.random.default_rng(seed).integers(1, 30, size=12).tolist()
    statistics = random_statistics(seed, lengths)
    result = replay(tree, statistics)
    rows, depths = walked(tree, statistics)
    assert np.flatnonzero(result.starts_P).tolist() == rows
    assert result.num_steps == len(rows)
    assert result.tokens == sum(lengths)
    assert result.steps_by_depth == [depths.count(d) for d in range(tree.depth + 1)]
    shares = [sum(depth >= d for depth in depths) / len(rows) for d in range(1, tree.depth + 1)]
    assert result.acceptance_by_depth == pytest.approx(shares)
    tokens_after_the_first = sum(length - 1 for length in lengths)
    assert result.acceptance_length == pytest.approx(tokens_after_the_first / len(rows))


def test_an_answer_by_hand():
    # Step at row 0 takes both heads' best guesses and jumps to row 3; step there takes none;
    # row 4 is the last token, which needs no forward: 2 forwards for 4 more tokens.
    ranks = [[0, 0], [1, 1], [1, 1], [1, -1], [-1, -1]]
    result = replay(CandidateTree.chain(2), RankStatistics(np.array(ranks), np.array([0]), 2))
    assert (result.num_steps, result.tokens, result.acceptance_length) == (2, 5, 2.0)
    assert result.steps_by_depth == [1, 0, 1]
    assert result.acceptance_by_depth == [0.5, 0.5]


def test_how_many_steps_accept_each_node():
    # Steps start at rows 0 (which accepts both nodes), 3 (none) and, in the second answer, 0 (one).
    ranks = [[0, 0], [1, 1], [1, 1], [1, -1], [-1, -1], [0, 1], [0, -1], [-1, -1]]
    entries = [[2, 4], [2, 3], [2, 3], [32767, 32767], [32767, 32767], [3, 32767],
               [2, 32767], [32767, 32767]]  # fmt: skip
    statistics = RankStatistics(np.array(ranks), np.array([0, 5]), 2, entries_PK=np.array(entries))
    chain = CandidateTree.chain(2)
    assert replay(chain, statistics).num_steps == 3
    assert node_shares(chain, statistics) == pytest.approx([1, 2 / 3, 1 / 3])
    # The grown trees' steps start at the same rows. Nodes come by falling probability there.
    assert node_shares(DynamicTree(4, (1.0, 1.0), 2), statistics) == pytest.approx(
        [1, 1 / 3, 1 / 3, 1 / 3]
    )
    mean = 1 + sum(node_shares(chain, statistics)[1:])
    assert replay(chain, statistics).acceptance_length == pytest.approx(mean)


def test_missing_ranks_never_match():
    ranks = [[32767, 0], [32767, -1], [-1, -1]]
    result = replay(CandidateTree.chain(2), RankStatistics(np.array(ranks), np.array([0]), 2))
    assert result.acceptance_length == 1.0
    assert result.acceptance_by_depth == [0.0, 0.0]


def test_perfect_heads_stop_at_the_end_of_the_answer():
    statistics = random_statistics(0, [8, 9, 10], num_ranks=1, missing=0.0)
    result = replay(CandidateTree.chain(3), statistics)
    # Four tokens a step, the last step of an answer cut: 8 -> 0 4, 9 -> 0 4, 10 -> 0 4 8.
    assert np.flatnonzero(result.starts_P).tolist() == [0, 4, 8, 12, 17, 21, 25]
    assert result.acceptance_length == 24 / 7


def test_plain_decoding_is_exactly_one():
    assert (
        replay(CandidateTree.root_only(), random_statistics(3, [7, 2, 19])).acceptance_length == 1
    )


@pytest.mark.parametrize("lengths", [[], [1], [1, 1, 1]])
def test_nothing_to_decode(lengths):
    result = replay(BUSHY, random_statistics(0, lengths))
    assert (result.acceptance_length, result.num_steps, result.tokens) == (1.0, 0, len(lengths))
    assert result.steps_by_depth == [0, 0, 0, 0]
    assert result.acceptance_by_depth == [0.0, 0.0, 0.0]
    assert not result.starts_P.any()


def test_tree_beyond_the_statistics_is_refused():
    with pytest.raises(TreeError, match="depth 3"):
        replay(BUSHY, random_statistics(0, [9], num_heads=2))
    with pytest.raises(TreeError, match="rank 2"):
        replay(BUSHY, random_statistics(0, [9], num_ranks=2))
