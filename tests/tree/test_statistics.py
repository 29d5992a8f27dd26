import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.rank_tables import random_statistics

from medusa_kit.errors import CheckpointError, TreeError
from medusa_kit.tree.statistics import MISSING, NOT_AVAILABLE, RankStatistics

# Two answers, of 3 tokens and of 1.
RANKS = [[0, 5], [32767, -1], [-1, -1], [-1, -1]]
STARTS = [0, 3]


def small(ranks=RANKS, starts=STARTS, num_ranks=4, meta=None) -> RankStatistics:
    return RankStatistics(np.array(ranks), np.array(starts), num_ranks, meta or {})


def same(a: RankStatistics, b: RankStatistics) -> bool:
    return (
        np.array_equal(a.ranks_PK, b.ranks_PK)
        and np.array_equal(a.starts, b.starts)
        and (a.num_ranks, a.meta) == (b.num_ranks, b.meta)
        and np.array_equal(a.entries_PK, b.entries_PK)
    )


def answers(statistics: RankStatistics) -> list[list[list[int]]]:
    return [part.tolist() for part in np.split(statistics.ranks_PK, statistics.starts[1:])]


def test_fields():
    statistics = small()
    assert (statistics.num_positions, statistics.num_heads, statistics.num_answers) == (4, 2, 2)
    assert statistics.lengths().tolist() == [3, 1]
    assert (statistics.ranks_PK.dtype, statistics.starts.dtype) == (np.int16, np.int64)
    assert (MISSING, NOT_AVAILABLE) == (32767, -1)


def test_ranks_beyond_the_last_are_missing():
    assert small(num_ranks=6).ranks_PK[0].tolist() == [0, 5]
    assert small(num_ranks=5).ranks_PK[0].tolist() == [0, MISSING]
    # 65536 is 0 in 16 bits.
    assert small([[65536, 0], [1, -1], [-1, -1]], [0]).ranks_PK[0].tolist() == [MISSING, 0]


def test_marginals_count_missing_but_not_the_end():
    # Head 0 has a true token in two rows, found once; head 1 in one row, at rank 2.
    statistics = small([[0, 2], [32767, -1], [-1, -1], [-1, -1]])
    assert statistics.marginals().tolist() == [[0.5, 0, 0, 0], [0, 0, 1.0, 0]]


def test_marginals_with_weights():
    weighted = small().marginals(np.array([3.0, 1.0, 7.0, 7.0]))
    assert weighted.tolist() == [[0.75, 0, 0, 0], [0, 0, 0, 0]]
    assert small().marginals(np.zeros(4)).tolist() == [[0] * 4] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_ranks": 32768}, "num_ranks is 32768"),
        ({"ranks": [0, 1]}, r"shape \(2,\)"),
        ({"ranks": [[0.0, 1.0]], "starts": [0]}, "float64"),
        ({"starts": [1, 3]}, "first rows"),
        ({"starts": [0, 3, 3]}, "first rows"),
        ({"starts": [0, 4]}, "first rows"),
        ({"starts": [0.0, 3.0]}, "first rows"),
        ({"starts": 0}, "first rows"),
        ({"starts": [0]}, "head 1 has rank -1 at row 1, expected a rank >= 0"),
        ({"starts": [0, 2]}, "head 1 has rank 32767 at row 0, expected -1"),
        ({"ranks": [[-2, 0], [0, -1], [-1, -1], [-1, -1]]}, "head 0 has rank -2 at row 0"),
    ],
)
def test_contradictions_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        small(**change)


def test_no_answers_at_all():
    empty = RankStatistics(np.zeros((0, 2), dtype=np.int16), np.array([]), 4)
    assert (empty.num_positions, empty.num_answers) == (0, 0)
    assert empty.marginals().tolist() == [[0] * 4] * 2


def test_file_round_trip(tmp_path):
    statistics = random_statistics(0, [4, 1, 9])
    statistics.save(tmp_path / "statistics.npz")
    assert same(RankStatistics.load(tmp_path / "statistics.npz"), statistics)
    assert [file.name for file in tmp_path.iterdir()] == ["statistics.npz"]


def test_name_is_kept_as_given(tmp_path):
    small().save(tmp_path / "ranks")
    assert same(RankStatistics.load(tmp_path / "ranks"), small())


def test_malformed_files_are_refused(tmp_path):
    path = tmp_path / "statistics.npz"
    with pytest.raises(CheckpointError, match="no statistics file at"):
        RankStatistics.load(path)
    small().save(path)
    whole = path.read_bytes()
    for content in (b"", b"not a zip", whole[: len(whole) // 2], whole[:-30]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"statistics\.npz: not a medusa-kit statistics"):
            RankStatistics.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks_PK": None}, "not a medusa-kit statistics file"),
        ({"header": None}, "not a medusa-kit statistics file"),
        ({"header": "[]"}, "not a medusa-kit statistics file"),
        ({"header": "{"}, "not a medusa-kit statistics file"),
        ({"version": 2}, "format 'medusa-kit-statistics' version 2"),
        ({"starts": [0, 2]}, "head 1 has rank 32767 at row 0"),
    ],
)
def test_files_with_other_content_are_refused(tmp_path, change, message):
    version = change.pop("version", 1)
    header = {"format": "medusa-kit-statistics", "version": version, "num_ranks": 4, "meta": {}}
    arrays = {"ranks_PK": RANKS, "starts": STARTS, "header": json.dumps(header)} | change
    np.savez(tmp_path / "file.npz", **{k: np.array(v) for k, v in arrays.items() if v is not None})
    with pytest.raises(CheckpointError, match=rf"file\.npz: .*{message}"):
        RankStatistics.load(tmp_path / "file.npz")


def test_split_deals_out_whole_answers():
    statistics = random_statistics(1, [5, 1, 7, 3, 2, 8, 4, 6, 9, 10])
    fit, held_out = statistics.split(0.3, seed=4)
    assert (fit.num_answers, held_out.num_answers) == (7, 3)
    together = answers(fit) + answers(held_out)
    assert sorted(together, key=len) == sorted(answers(statistics), key=len)
    assert fit.meta == held_out.meta == statistics.meta
    again = statistics.split(0.3, seed=4)
    assert same(fit, again[0])
    assert same(held_out, again[1])
    others = [answers(statistics.split(0.3, seed)[1]) for seed in range(5)]
    assert any(other != others[0] for other in others)


def test_split_leaves_neither_part_empty():
    statistics = random_statistics(1, [5, 3])
    for fraction in (0.01, 0.99):
        parts = statistics.split(fraction, seed=0)
        assert [part.num_answers for part in parts] == [1, 1]
    with pytest.raises(TreeError, match="1 answers cannot be split"):
        parts[0].split(0.5, seed=0)
    for fraction in (0.0, 1.0, -0.5):
        with pytest.raises(TreeError, match="held-out fraction"):
            statistics.split(fraction, seed=0)


def test_concat_is_the_answers_in_order():
    first, second = random_statistics(1, [5, 1]), random_statistics(1, [3, 4, 2])
    joined = RankStatistics.concat([first, second])
    assert answers(joined) == answers(first) + answers(second)
    assert same(RankStatistics.concat([first]), first)


def test_concat_refuses_strangers():
    ours = random_statistics(1, [5])
    with pytest.raises(CheckpointError, match="num_heads 2"):
        RankStatistics.concat([ours, random_statistics(1, [5], num_heads=2)])
    with pytest.raises(CheckpointError, match="num_ranks 4"):
        RankStatistics.concat([ours, random_statistics(1, [5], num_ranks=4)])
    with pytest.raises(CheckpointError, match="seed 2"):
        RankStatistics.concat([ours, random_statistics(2, [5])])
    with pytest.raises(CheckpointError, match="at least one part"):
        RankStatistics.concat([])


def with_entries(statistics: RankStatistics, seed: int = 0) -> RankStatistics:
    rises = np.random.default_rng(seed).integers(1, 4, statistics.ranks_PK.shape)
    entries_PK = np.where(statistics.ranks_PK == -1, 32767, 1 + rises.cumsum(1))
    return replace(statistics, entries_PK=entries_PK)


def test_entries_travel_with_their_rows(tmp_path):
    statistics = with_entries(random_statistics(0, [4, 1, 9, 6]))
    assert statistics.entries_PK.dtype == np.int16
    statistics.save(tmp_path / "statistics.npz")
    assert same(RankStatistics.load(tmp_path / "statistics.npz"), statistics)
    parts = statistics.split(0.5, seed=1)
    rows = [row for part in parts for row in part.entries_PK.tolist()]
    assert sorted(rows) == sorted(statistics.entries_PK.tolist())
    bare = random_statistics(0, [3])
    assert RankStatistics.concat([statistics, bare]).entries_PK is None
    joined = RankStatistics.concat([statistics, with_entries(bare)]).entries_PK
    assert joined[: len(rows)].tolist() == statistics.entries_PK.tolist()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[2, 3]], r"entries have shape \(1, 2\)"),
        ([[2.0, 3.0], [2, 9], [9, 9], [9, 9]], "float64"),
        ([[2, 3], [1, 32767], *[[32767] * 2] * 2], "entries are inconsistent"),
        ([[3, 3], *[[32767] * 2] * 3], "entries are inconsistent"),
        ([[32767, 3], *[[32767] * 2] * 3], "entries are inconsistent"),
        ([[2, 3], [2, 3], *[[32767] * 2] * 2], "entries are inconsistent"),
        ([[2, 70000], *[[32767] * 2] * 3], "entries are inconsistent"),
    ],
)
def test_impossible_entries_are_refused(entries, message):
    with pytest.raises(CheckpointError, match=message):
        replace(small(), entries_PK=np.array(entries))


def with_contents(contents: list[tuple[int, int]]) -> RankStatistics:
    lengths = [4] * len(contents)
    ranks_PK = np.concatenate([[[n], [n], [n], [-1]] for n in range(len(contents))])
    starts = np.cumsum([0, *lengths[:-1]])
    return RankStatistics(ranks_PK, starts, 64, {}, None, np.array(contents, dtype=np.int64))


def sides(statistics: RankStatistics, fraction: float, seed: int) -> list[set[tuple[int, int]]]:
    parts = statistics.split(fraction, seed)
    assert sum(part.num_answers for part in parts) == statistics.num_answers
    return [set(map(tuple, part.contents_A2.tolist())) for part in parts]  # type: ignore


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8])
def test_equal_answers_stay_on_one_side(fraction: float) -> None:
    """Answers twice, a prompt with two answers, an answer to two prompts."""
    contents = [(n, n) for n in range(12)] + [(n, n) for n in range(6)] + [(7, 70), (80, 8)]
    for seed in range(20):
        fit, held_out = sides(with_contents(contents), fraction, seed)
        for column in range(2):
            assert not {one[column] for one in fit} & {one[column] for one in held_out}


def test_answers_to_one_prompt_are_split_by_answer() -> None:
    for seed in range(5):
        fit, held_out = sides(with_contents([(1, n % 5) for n in range(15)]), 0.4, seed)
        assert len(fit) == 3
        assert len(held_out) == 2
        assert not fit & held_out


def test_answers_that_are_all_the_same_are_refused() -> None:
    with pytest.raises(TreeError, match="3 answers, all of them the same, cannot be split"):
        with_contents([(1, 1)] * 3).split(0.5, 0)


def test_answers_that_differ_are_split_as_without_contents() -> None:
    known = with_contents([(n, n) for n in range(30)])
    plain = RankStatistics(known.ranks_PK, known.starts, 64)
    for seed in range(5):
        for one, other in zip(known.split(0.3, seed), plain.split(0.3, seed), strict=True):
            assert np.array_equal(one.ranks_PK, other.ranks_PK)


def test_contents_are_kept(tmp_path: Path) -> None:
    statistics = with_contents([(-5, 2**62), (3, 4)])
    statistics.save(tmp_path / "s.npz")
    again = RankStatistics.load(tmp_path / "s.npz")
    assert again.contents_A2 is not None
    assert again.contents_A2.tolist() == [[-5, 2**62], [3, 4]]
    joined = RankStatistics.concat([again, statistics])
    assert joined.contents_A2 is not None
    assert len(joined.contents_A2) == 4
    with pytest.raises(CheckpointError, match="contents have shape"):
        RankStatistics(again.ranks_PK, again.starts, 64, {}, None, np.zeros((3, 2), np.int64))
