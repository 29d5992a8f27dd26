import pytest
import torch

from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.train.batching import Cutting, LiveFeed, StoredFeed, partition
from medusa_kit.train.data import head_targets, prepare
from medusa_kit.train.features.features import (
    FeatureOptions,
    batches,
    check_packing,
    collect_features,
    cuts,
)
from medusa_kit.train.features.rows import Rows
from medusa_kit.train.processes import distributed

KINDS = ["memory", "live"]


def make_feed(kind, base, items, cutting, options):
    if kind == "live":
        return LiveFeed(base, items, cutting, options)
    return StoredFeed(collect_features(base, items, options), cutting)


def everything(feed, seed=5, first=0):
    """Hidden states and targets of an epoch, one entry an update."""
    return [
        (
            torch.cat([batch.hidden_PD for batch in update.batches]),
            torch.cat([batch.ahead_PJ for batch in update.batches]),
        )
        for update in feed.epoch(seed, first)
    ]


def by_first(hidden_PD):
    """Sorted by the first component, which is different for every position: a multiset."""
    return hidden_PD[hidden_PD[:, 0].argsort()]


def test_features_equal_one_row_at_a_time(tiny_base, counting_rows):
    base = tiny_base()
    items = prepare(counting_rows(3, prompt=2, answer=9) + counting_rows(4, prompt=5, answer=20), 2)
    store = collect_features(base, items, FeatureOptions(60))
    expected_hidden, expected_targets = [], []
    for item in sorted(items, key=lambda item: -len(item.input_ids)):
        hidden_1TD = base.hidden_states(torch.tensor([item.input_ids]))
        expected_hidden.append(hidden_1TD[0, item.positions_P])
        expected_targets.append(torch.from_numpy(item.ahead_PJ))
    torch.testing.assert_close(store.hidden_PD, torch.cat(expected_hidden), rtol=1e-5, atol=1e-5)
    assert torch.equal(store.ahead_PJ, torch.cat(expected_targets))


def test_batches_keep_to_the_token_budget(counting_rows):
    items = prepare(counting_rows(5, 2, 10) + counting_rows(5, 2, 30), 2)
    groups = batches(items, 50)
    assert [item for group in groups for item in group] == items
    for group in groups:
        padded = len(group) * max(len(item.input_ids) for item in group)
        assert padded <= 50 or len(group) == 1
    assert len(groups) < len(items)


def test_cuts_cover_everything_evenly():
    assert cuts(10, 3) == [(0, 3), (3, 6), (6, 10)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_position_once_and_can_start_in_its_middle(
    tiny_base, counting_rows, kind
):
    base, items = tiny_base(), prepare(counting_rows(12), 3)
    options = FeatureOptions(70)
    store = collect_features(base, items, options)
    feed = make_feed(kind, base, items, Cutting(40), options)
    assert feed.updates_per_epoch == 6
    whole = everything(feed)
    assert len(whole) == 6
    seen = torch.cat([hidden_PD for hidden_PD, _ in whole])
    torch.testing.assert_close(by_first(seen), by_first(store.hidden_PD), rtol=1e-4, atol=1e-5)
    for first in range(7):
        later = everything(feed, first=first)
        assert len(later) == 6 - first
        for update, other in zip(whole[first:], later, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(update, other, strict=True))
    assert not torch.equal(everything(feed, seed=6)[0][1], whole[0][1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("accumulation", "world"), [(1, 1), (3, 1), (1, 2), (2, 2), (5, 3)])
def test_an_update_is_the_same_however_it_is_cut(
    tiny_base, counting_rows, monkeypatch, kind, accumulation, world
):
    """Micro-batches of all processes together hold the update's positions, each exactly once."""
    base = tiny_base()
    items = prepare(counting_rows(9) + counting_rows(4, prompt=2, answer=7), 2)
    options = FeatureOptions(90)
    expected = everything(make_feed(kind, base, items, Cutting(60), options))
    found = [[] for _ in expected]
    for rank in range(world):
        feed = make_feed(kind, base, items, Cutting(60, accumulation), options)
        monkeypatch.setattr(distributed, "world", lambda: world)
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        for index, update in enumerate(feed.epoch(5)):
            assert len(update.batches) == accumulation
            targets = torch.cat([batch.ahead_PJ for batch in update.batches])
            hidden = torch.cat([batch.hidden_PD for batch in update.batches])
            found[index].append((hidden[targets[:, 0] >= 0], update.ahead_PJ))
        monkeypatch.undo()
    for (hidden_PD, ahead_PJ), parts in zip(expected, found, strict=True):
        together = torch.cat([part for part, _ in parts])
        torch.testing.assert_close(by_first(together), by_first(hidden_PD), rtol=1e-4, atol=1e-5)
        for _, whole_PJ in parts:
            assert sorted(map(tuple, whole_PJ.tolist())) == sorted(map(tuple, ahead_PJ.tolist()))


def test_partition_is_even_and_leaves_no_part_empty():
    assert partition([1] * 6, 3) == [(0, 2), (2, 4), (4, 6)]
    assert partition([100, 1, 1, 1], 3) == [(0, 1), (1, 2), (2, 4)]
    assert partition([5, 5], 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]
    for sizes in ([1, 1, 1, 100], [3, 9, 2, 2, 8, 1], [1] * 17):
        for parts in range(1, len(sizes) + 1):
            ranges = partition(sizes, parts)
            assert [ranges[0][0], ranges[-1][1]] == [0, len(sizes)]
            assert all(a < b for a, b in ranges)
            assert all(ranges[i][1] == ranges[i + 1][0] for i in range(parts - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_soft_targets_are_what_the_base_says_where_the_target_stands(
    tiny_base, counting_rows, kind
):
    """Each position is found again by its hidden state; the oracle is the model's own forward."""
    base, rows = tiny_base(), counting_rows(5, prompt=3, answer=11)
    items = prepare(rows, 3)
    feed = make_feed(kind, base, items, Cutting(14), FeatureOptions(50, soft_top=4))
    expected = []
    for row in rows:
        item = head_targets(row, 3)
        ids_1T = torch.tensor([row.input_ids])
        chances_TV = base.model(ids_1T).logits[0].softmax(-1)
        hidden_TD = base.hidden_states(ids_1T)[0]
        for t, ahead_J in zip(item.positions_P, item.ahead_PJ, strict=True):
            expected.append((hidden_TD[t], torch.from_numpy(ahead_J), chances_TV, int(t)))
    hidden_ED = torch.stack([hidden for hidden, *_ in expected])
    checked = 0
    for batch in [batch for update in feed.epoch(seed=1) for batch in update.batches]:
        for p in range(batch.num_positions):
            hidden_D = batch.hidden_PD[p]
            index = int((hidden_ED - hidden_D).abs().sum(1).argmin())
            _, ahead_J, chances_TV, t = expected[index]
            assert torch.equal(batch.ahead_PJ[p], ahead_J)
            for k in range(3):
                if ahead_J[k + 1] < 0:
                    continue
                values, ids = chances_TV[t + 1 + k].topk(4)
                torch.testing.assert_close(batch.soft.probabilities_PKS[p, k], values,
                                           rtol=1e-4, atol=1e-6)  # fmt: skip
                assert batch.soft.ids_PKS[p, k].tolist() == ids.tolist()
                checked += 1
    assert checked > 100


def test_packed_rows_do_not_see_each_other(tiny_base, counting_rows):
    base = tiny_base()
    items = prepare(counting_rows(3, 2, 9) + counting_rows(2, 5, 20), 2)
    alone = torch.cat([Rows.of([item], base.device, False).hidden_PD(base) for item in items])
    packed = Rows.of(items, base.device, True).hidden_PD(base)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    store = collect_features(base, items, FeatureOptions(60, packing=True))
    other = collect_features(base, items, FeatureOptions(60))
    torch.testing.assert_close(store.hidden_PD, other.hidden_PD, rtol=1e-4, atol=1e-5)
    assert torch.equal(store.ahead_PJ, other.ahead_PJ)
    check_packing(base, items)


def test_a_family_that_mixes_packed_rows_is_refused(tiny_base, counting_rows, monkeypatch):
    """As in a family that ignores position ids, where rows see those before them."""
    base = tiny_base()
    items = prepare(counting_rows(3), 2)
    original = base.traced_hidden_states
    monkeypatch.setattr(
        base, "traced_hidden_states", lambda ids, mask, positions: original(ids, mask)
    )
    with pytest.raises(IncompatibleBaseError, match="packed and of separate rows differ"):
        check_packing(base, items)


def test_packing_fills_a_forward_by_tokens_not_by_the_longest(counting_rows):
    items = prepare(counting_rows(1, 2, 30) + counting_rows(6, 2, 6), 2)
    assert [len(group) for group in batches(items, 80, packing=True)] == [7]
    assert len(batches(items, 80)) > 1
