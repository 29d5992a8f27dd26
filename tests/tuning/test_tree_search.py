"""Which tree is chosen, given step times; what it is chosen from; what a search refuses."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rank_tables import random_statistics
from support.small_engines import build_engine, endless_base, engine_with_heads, random_heads
from support.text.other_encodings import base_that_reads

from medusa_kit.data.readers import AnswerRow
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, TreeError
from medusa_kit.infer.device.captured import CapturedForward
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tree.replay import node_shares, replay, replay_dynamic
from medusa_kit.tree.statistics import MISSING, RankStatistics
from medusa_kit.tuning import tree_search as module
from medusa_kit.tuning.calibrate import calibrate
from medusa_kit.tuning.step_time import measure_step_times
from medusa_kit.tuning.tree_search import TreeRow, judge_tree, search_tree

SIZES = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_with_heads()


@pytest.fixture(scope="module")
def statistics() -> RankStatistics:
    return random_statistics(0, [40] * 30, num_ranks=6, missing=0.3)


def with_times(monkeypatch: pytest.MonkeyPatch, milliseconds: dict) -> None:
    monkeypatch.setattr(
        module, "measure_step_times", lambda _, trees, **__: {n: milliseconds[n] for n in trees}
    )


@pytest.mark.parametrize("cost", [0.0, 0.05, 0.15, 5.0])
def test_the_fastest_tree_wins_not_the_longest(
    engine: Engine, statistics: RankStatistics, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {n: 1.0 + cost * (n - 1) for n in SIZES}
    with_times(monkeypatch, times)
    search = search_tree(engine, statistics, SIZES)
    assert [row.num_nodes for row in search.rows] == list(SIZES)
    for row in search.rows:
        assert row.tree.num_nodes == row.num_nodes
        assert row.speed_up == pytest.approx(row.acceptance_length * times[1] / row.step_seconds)
    assert search.chosen.speed_up == max(row.speed_up for row in search.rows)
    expected = {0.0: 16, 5.0: 1}.get(cost)
    assert expected is None or search.chosen.num_nodes == expected


def test_lengths_come_from_answers_the_search_has_not_seen(
    engine: Engine, statistics: RankStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_times(monkeypatch, {n: 1.0 for n in SIZES})
    _, held_out = statistics.split(module.HELD_OUT, seed=0)
    for row in search_tree(engine, statistics, SIZES).rows:
        assert row.acceptance_length == replay(row.tree, held_out).acceptance_length


def test_a_fixed_size_is_taken_whatever_its_speed(
    engine: Engine, statistics: RankStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_times(monkeypatch, {n: float(n) for n in (*SIZES, 5)})
    search = search_tree(engine, statistics, SIZES, fixed_size=5)
    assert search.chosen.num_nodes == 5
    table = search.as_extra(engine)
    assert table["base_fingerprint"] == engine.base.info.fingerprint
    assert [row["num_nodes"] for row in table["table"]] == [1, 2, 4, 5, 8, 16]
    assert table["acceptance_length"] == pytest.approx(search.chosen.acceptance_length, abs=1e-4)


@pytest.mark.parametrize("pays", [True, False])
def test_a_large_tree_promises_what_is_verified_of_it(
    engine: Engine, statistics: RankStatistics, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 nodes the static tree is faster, with the nodes that pay the dynamic one is."""
    monkeypatch.setattr(Engine, "pays", property(lambda engine: pays))
    times = {n: 1.0 + 0.3 * n for n in SIZES}
    with_times(monkeypatch, times | {("dynamic", n): times[n] + 20 * (n == 16) for n in SIZES})
    search = search_tree(engine, with_entries(statistics, 1), SIZES, fixed_size=16)
    assert search.chosen.num_nodes == 16
    assert (search.chosen.dynamic is not None) == pays
    same = [row for row in search.rows if (row.dynamic is not None) == pays or row.num_nodes == 1]
    best = max(same, key=lambda row: row.speed_up)
    assert best.num_nodes < 16
    assert best.speed_up > search.chosen.speed_up
    assert search.decoded == (best if pays else search.chosen)
    promised = search.as_extra(engine)["predicted_speed_up"]
    assert promised == pytest.approx(search.decoded.speed_up, abs=1e-4)


@pytest.mark.parametrize(("slower", "dynamic"), [(-0.2, True), (0.03, True), (0.2, False)])
@pytest.mark.parametrize("fixed_size", [None, 16])
def test_of_two_alike_the_dynamic_one_is_taken(
    engine: Engine,
    statistics: RankStatistics,
    slower: float,
    dynamic: bool,
    fixed_size: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes pay here, of either sort; with 16 the static tree is the faster one as a whole."""
    monkeypatch.setattr(Engine, "pays", property(lambda engine: True))
    times = {n: 1.0 if n < 4 else 10.0 * n for n in SIZES}
    grown = {("dynamic", n): times[n] * (1 + (slower if n == 2 else 5)) for n in SIZES}
    with_times(monkeypatch, times | grown)
    search = search_tree(engine, with_entries(statistics, 1), SIZES, fixed_size=fixed_size)
    whole = {row.dynamic is not None: row for row in search.rows if row.num_nodes == 16}
    assert whole[True].speed_up < whole[False].speed_up
    assert search.chosen.num_nodes == (fixed_size or 2)
    assert (search.chosen.dynamic is not None) == dynamic
    assert search.decoded.num_nodes == 2


def test_a_given_tree_is_judged_on_all_answers(
    engine: Engine, statistics: RankStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = CandidateTree([(0,), (1,), (0, 0)])
    with_times(monkeypatch, {1: 1.0, 4: 1.25})
    search = judge_tree(engine, statistics, tree)
    assert search.chosen.tree == tree
    length = replay(tree, statistics).acceptance_length
    assert search.chosen.acceptance_length == length
    assert search.chosen.speed_up == pytest.approx(length / 1.25)
    assert math.isnan(search.chosen.promised_length)


def with_entries(statistics: RankStatistics, shift: int) -> RankStatistics:
    """Dynamic trees that hold the true path wherever low ranks do, from `shift` nodes on."""
    ranks_PK = statistics.ranks_PK
    steps_PK = np.where(ranks_PK < 0, MISSING, ranks_PK.astype(np.int64)) + 1
    entries_PK = np.minimum(np.cumsum(steps_PK, axis=1) + shift, MISSING)
    grown = DynamicTree(16, (1.0, 1.5, 2.0), num_ranks=6)
    return replace(statistics, entries_PK=entries_PK, meta={"dynamic": grown.as_dict()})


@pytest.mark.parametrize("shift", [1, 12])
def test_dynamic_trees_compete_at_the_same_sizes(
    engine: Engine, statistics: RankStatistics, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By replay and their own step times; a slow or a short one loses to the static tree."""
    recorded = with_entries(statistics, shift)
    keys = {n: 1.0 + 0.02 * n for n in SIZES} | {("dynamic", n): 1.01 + 0.02 * n for n in SIZES}
    with_times(monkeypatch, keys)
    search = search_tree(engine, recorded, SIZES)
    dynamic = [row for row in search.rows if row.dynamic]
    assert [row.num_nodes for row in dynamic] == [2, 4, 8, 16]  # one node is plain decoding
    _, held_out = recorded.split(module.HELD_OUT, seed=0)
    for row in dynamic:
        assert row.dynamic == DynamicTree(row.num_nodes, (1.0, 1.5, 2.0), num_ranks=6)
        assert row.acceptance_length == replay_dynamic(row.num_nodes, held_out).acceptance_length
        assert row.speed_up == row.acceptance_length * keys[1] / keys["dynamic", row.num_nodes]
    assert search.chosen.speed_up == max(row.speed_up for row in search.rows)
    assert (search.chosen.dynamic is None) == (shift == 12)
    chosen, (planned,) = search.chosen, search.plan.trees
    assert (planned.static, planned.dynamic) == (chosen.tree, chosen.dynamic)
    shares = node_shares(chosen.dynamic or chosen.tree, held_out)[1:]
    assert planned.acceptance == pytest.approx(shares, abs=1e-4)
    with_times(monkeypatch, keys | {("dynamic", n): 9.0 for n in SIZES})
    assert search_tree(engine, recorded, SIZES).chosen.dynamic is None


def test_each_batch_size_has_its_own_fastest_tree(
    engine: Engine, statistics: RankStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's cost for each node grows with the batch, so the trees get smaller."""

    def times(_: Engine, trees: dict, batch_size: int) -> dict:
        return {n: 1.0 + 0.03 * batch_size * n for n in trees}

    monkeypatch.setattr(module, "measure_step_times", times)
    search = search_tree(engine, statistics, SIZES, batch_sizes=(64, 4))
    assert [row.batch_size for row in search.by_batch] == [1, 4, 64]
    chosen = [row.num_nodes for row in search.by_batch]
    assert chosen == sorted(chosen, reverse=True)
    assert (chosen[0] > 1, chosen[2]) == (True, 1)
    assert [planned.batch_size for planned in search.plan.trees] == [1, 4, 64]
    assert [row["batch_size"] for row in search.as_extra(engine)["table"][5:10]] == [4] * 5
    with pytest.raises(ConfigError, match="batch size 0"):
        search_tree(engine, statistics, SIZES, batch_sizes=(0, 4))


def test_statistics_without_dynamic_trees_cannot_replay_them(statistics: RankStatistics) -> None:
    with pytest.raises(TreeError, match="hold no dynamic trees"):
        replay_dynamic(4, statistics)


def test_measured_steps_leave_the_engine_as_it_was(engine: Engine) -> None:
    prompt = [5, 6, 7, 8]
    before = engine.generate(prompt, max_new_tokens=10).token_ids
    trees = {1: CandidateTree.root_only(), 4: CandidateTree([(0,), (1,), (0, 0)])}
    seconds = measure_step_times(engine, trees, prefix_lengths=(8, 500), repeats=2)
    assert set(seconds) == {1, 4}
    assert all(0 < second < 60 for second in seconds.values())
    grown = {"grown": DynamicTree(6, (1.0, 1.0, 1.0), num_ranks=6)}
    assert set(measure_step_times(engine, grown, (8,), 1, batch_size=3)) == {1, "grown"}
    assert engine.generate(prompt, max_new_tokens=10).token_ids == before


@pytest.mark.parametrize("batch_size", [1, 3])
def test_what_is_timed_is_what_decodes(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    """Captured forwards, of all trees alike. The clock advances by one second a node."""
    now = ran = 0
    replay = CapturedForward.replay

    def counted(self: CapturedForward, num_nodes: int) -> Any:
        nonlocal now, ran
        now, ran = now + num_nodes // batch_size, ran + 1
        return replay(self, num_nodes)

    base = endless_base(14)
    trees = {1: CandidateTree.root_only(), 4: CandidateTree([(0,), (1,), (0, 0)]),
             "grown": DynamicTree(6, (1.0, 1.0, 1.0), num_ranks=6)}  # fmt: skip
    engine = build_engine(base, heads=random_heads(base), tree=trees[4], fixed_shapes="always")
    monkeypatch.setattr(CapturedForward, "replay", counted)
    seconds = measure_step_times(engine, trees, (8, 50), 3, batch_size, clock=lambda: float(now))
    assert seconds == pytest.approx({1: 1.0, 4: 4.0, "grown": 6.0})
    assert isinstance(engine.verifier, CapturedVerifier)
    assert (engine.verifier.num_loose, ran % len(trees)) == (0, 0)


def test_statistics_of_other_heads_or_bases_are_refused(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of 2 heads; these are 3"):
        search_tree(engine, random_statistics(0, [9, 9], num_heads=2))
    own = random_statistics(0, [9, 9])
    foreign = RankStatistics(own.ranks_PK, np.array(own.starts), own.num_ranks,
                             {"base_fingerprint": "other", "base_model": "B"})  # fmt: skip
    with pytest.raises(ConfigError, match="another base"):
        search_tree(engine, foreign)
    base = engine.base
    config = {**base.computation, "hidden_act": "relu"}
    edited = replace(own, meta={"base_fingerprint": base.info.fingerprint, "base_config": config})
    with pytest.raises(ConfigError, match=r"another config of the base .*relu"):
        search_tree(engine, edited)
    edited.save(tmp_path / "found.npz")
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'found.npz'} was made with another"):
        search_tree(engine, RankStatistics.load(tmp_path / "found.npz"))
    with pytest.raises(ConfigError, match="no heads"):
        search_tree(Engine(engine.verifier, engine.check, engine.scheduler), own)


def test_statistics_of_text_that_was_encoded_otherwise_are_told_and_named_in_the_tree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_times(monkeypatch, {1: 1.0, 2: 1.1})
    base, then = base_that_reads(single_digits=True), base_that_reads(single_digits=False)
    engine = build_engine(base, heads=random_heads(base), tree=[[0]])
    measured = calibrate(base, random_heads(base), [AnswerRow([1], [2, 3], "stop", None, 1)])
    assert measured.meta["encoding"] == base.encoding
    for encoding, told in [
        (base.encoding, ""),
        (then.encoding, "were taken on text that was tokenized differently"),
        (None, "do not say whether they are of text that was tokenized differently"),
    ]:
        own = random_statistics(0, [40] * 3)
        statistics = replace(own, meta={} if encoding is None else {"encoding": encoding})
        judged = judge_tree(engine, statistics, CandidateTree.chain(1))
        found = [search_tree(engine, statistics, (1, 2)), judged]
        err = capsys.readouterr().err
        assert err.count("tokenized differently") == 2 * bool(told)
        assert told in err
        assert [one.as_extra(engine)["encoding"] for one in found] == [encoding] * 2


def test_equal_speed_goes_to_fewer_nodes_and_to_the_static_tree() -> None:
    tree = CandidateTree.root_only()
    grown = DynamicTree(4, (1.0,))
    rows = [
        TreeRow(16, tree, 3.0, 3.0, 2.0, 1.5, ""),
        TreeRow(4, tree, 1.5, 1.5, 1.0, 1.5, ""),
        TreeRow(4, tree, 1.5, 1.5, 1.0, 1.5, "", grown),
        TreeRow(1, tree, 1.0, 1.0, 1.0, 1.0, ""),
    ]
    assert module._fastest(rows) is rows[1]
    assert module._fastest([rows[3], TreeRow(2, tree, 1.2, 1.2, 1.2, 1.0, "")]) is rows[3]
