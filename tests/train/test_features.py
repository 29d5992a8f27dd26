import pytest
import torch

from medusa_kit.train.data import prepare
from medusa_kit.train.features import LiveFeatures, batches, collect_features, cuts


def test_features_equal_one_row_at_a_time(tiny_base, counting_rows):
    base = tiny_base()
    items = prepare(counting_rows(3, prompt=2, answer=9) + counting_rows(4, prompt=5, answer=20), 2)
    store = collect_features(base, items, batch_tokens=60)
    expected_hidden, expected_targets = [], []
    for item in sorted(items, key=lambda item: -len(item.input_ids)):
        hidden_1TD = base.hidden_states(torch.tensor([item.input_ids]))
        expected_hidden.append(hidden_1TD[0, item.positions_P])
        expected_targets.append(torch.from_numpy(item.targets_PK))
    torch.testing.assert_close(store.hidden_PD, torch.cat(expected_hidden), rtol=1e-5, atol=1e-5)
    assert torch.equal(store.targets_PK, torch.cat(expected_targets))


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


@pytest.mark.parametrize("live", [False, True])
def test_an_epoch_has_every_position_once_and_can_start_in_its_middle(
    tiny_base, counting_rows, live
):
    base, items = tiny_base(), prepare(counting_rows(7), 3)
    store = collect_features(base, items, 70)
    feed = LiveFeatures(base, items, 70) if live else store
    whole = list(feed.epoch(seed=5, num_batches=6))
    sizes = [len(targets) for _, targets in whole]
    assert sum(sizes) == len(store) == len(feed)
    assert max(sizes) - min(sizes) <= 1
    seen = torch.cat([hidden for hidden, _ in whole])
    # Compared as multisets: sorted by the first component, which is different for every position.
    torch.testing.assert_close(
        seen[seen[:, 0].argsort()],
        store.hidden_PD[store.hidden_PD[:, 0].argsort()],
        rtol=1e-4,
        atol=1e-5,
    )
    for first in range(7):
        later = list(feed.epoch(seed=5, num_batches=6, first=first))
        assert len(later) == 6 - first
        for (hidden, targets), (other_hidden, other_targets) in zip(
            whole[first:], later, strict=True
        ):
            assert torch.equal(targets, other_targets)
            assert torch.equal(hidden, other_hidden)
    other = next(iter(feed.epoch(seed=6, num_batches=6)))[1]
    assert not torch.equal(other, whole[0][1][: len(other)])
