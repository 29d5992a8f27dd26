import pytest
import torch

from medusa_kit.train.data import head_targets, prepare
from medusa_kit.train.features import LiveFeatures, batches, collect_features, cuts


def test_features_equal_one_row_at_a_time(tiny_base, counting_rows):
    base = tiny_base()
    items = prepare(counting_rows(3, prompt=2, answer=9) + counting_rows(4, prompt=5, answer=20), 2)
    store = collect_features(base, items, batch_tokens=60)
    expected_hidden, expected_targets = [], []
    for item in sorted(items, key=lambda item: -len(item.input_ids)):
        hidden_1TD = base.hidden_states(torch.tensor([item.input_ids]))
        expected_hidden.append(hidden_1TD[0, item.positions_P])
        expected_targets.append(torch.from_numpy(item.ahead_PJ))
    torch.testing.assert_close(
        store.positions.hidden_PD, torch.cat(expected_hidden), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(store.positions.ahead_PJ, torch.cat(expected_targets))


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
    sizes = [batch.num_positions for batch in whole]
    assert sum(sizes) == len(store) == len(feed)
    assert max(sizes) - min(sizes) <= 1
    seen = torch.cat([batch.hidden_PD for batch in whole])
    # Compared as multisets: sorted by the first component, which is different for every position.
    torch.testing.assert_close(
        seen[seen[:, 0].argsort()],
        store.positions.hidden_PD[store.positions.hidden_PD[:, 0].argsort()],
        rtol=1e-4,
        atol=1e-5,
    )
    for first in range(7):
        later = list(feed.epoch(seed=5, num_batches=6, first=first))
        assert len(later) == 6 - first
        for batch, other in zip(whole[first:], later, strict=True):
            assert torch.equal(batch.ahead_PJ, other.ahead_PJ)
            assert torch.equal(batch.hidden_PD, other.hidden_PD)
    other = next(iter(feed.epoch(seed=6, num_batches=6))).ahead_PJ
    assert not torch.equal(other, whole[0].ahead_PJ[: len(other)])


@pytest.mark.parametrize("live", [False, True])
def test_soft_targets_are_what_the_base_says_where_the_target_stands(
    tiny_base, counting_rows, live
):
    """Each position is found again by its hidden state; the oracle is the model's own forward."""
    base, rows = tiny_base(), counting_rows(5, prompt=3, answer=11)
    items = prepare(rows, 3)
    feed = (LiveFeatures(base, items, 50, soft_top=4) if live
            else collect_features(base, items, 50, soft_top=4))  # fmt: skip
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
    for batch in feed.epoch(seed=1, num_batches=4):
        for p in range(batch.num_positions):
            index = int((hidden_ED - batch.hidden_PD[p]).abs().sum(1).argmin())
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
