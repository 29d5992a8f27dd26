"""The chunked loss against the dense one, in float64: values and every gradient."""

import pytest
import torch
from torch.nn import functional as F

from medusa_kit.heads import MedusaHeads
from medusa_kit.train.loss import SoftTargets, heads_loss

REDUCED = torch.tensor([0, 3, 4, 9, 15, 16, 30])


def dense_loss(heads, hidden_PD, ahead_PJ, decay):
    """The formula, written with full logits and torch's own cross-entropy."""
    total, per_head = 0.0, []
    for k in range(heads.num_heads):
        logits_PR = heads.project(heads.transform(hidden_PD, k, ahead_PJ), k)
        targets_P = ahead_PJ[:, k + 1].clone()
        if heads.column_ids is not None:
            table = {int(token): column for column, token in enumerate(heads.column_ids)}
            targets_P = torch.tensor([table.get(int(token), -1) for token in targets_P])
        loss = F.cross_entropy(logits_PR, targets_P, ignore_index=-1)
        per_head.append(loss.detach())
        total = total + decay ** (k + 1) * loss
    return total, torch.stack(per_head)


def random_heads(base, projection, kind="medusa"):
    ids_R = REDUCED if projection == "reduced" else None
    heads = MedusaHeads.for_base(base, 3, 2, projection, ids_R, kind)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
@pytest.mark.parametrize("kind", ["medusa", "rooted", "hydra"])
@pytest.mark.parametrize("capped", [False, True], ids=["plain", "scaled and capped"])
def test_loss_and_gradients_equal_the_dense_ones(tiny_base, projection, kind, capped):
    base = tiny_base(torch.float64)
    if capped:
        base.scale_logits = lambda logits: torch.tanh(logits * 3 / 2.0) * 2.0
    heads = random_heads(base, projection, kind)
    hidden_PD = torch.randn(23, 16, dtype=torch.float64)
    ahead_PJ = torch.randint(-1, 32, (23, 4))

    expected, per_head_K = dense_loss(heads, hidden_PD, ahead_PJ, 0.8)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad()

    result = heads_loss(heads, hidden_PD, ahead_PJ, decay=0.8, chunk=5)
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.per_head_K, per_head_K, rtol=1e-12, atol=1e-12)
    for parameter, gradient in zip(heads.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_soft_targets_equal_the_dense_formula(tiny_base, projection, share):
    """Part of the loss is against given probabilities, scaled to 1 over tokens with a column."""
    heads = random_heads(tiny_base(torch.float64), projection)
    hidden_PD = torch.randn(17, 16, dtype=torch.float64)
    ahead_PJ = torch.randint(-1, 32, (17, 4))
    chances_PKV = torch.randn(17, 3, 32, dtype=torch.float64).softmax(-1)
    top = chances_PKV.topk(5)
    kept = range(32) if heads.column_ids is None else heads.column_ids.tolist()
    expected = 0.0
    for k in range(3):
        logits_PR = heads.project(heads.transform(hidden_PD, k, ahead_PJ), k)
        total, count = 0.0, 0
        for p in range(17):
            target = int(ahead_PJ[p, k + 1])
            if target < 0:
                continue
            log = dict(zip(kept, logits_PR[p].log_softmax(-1), strict=True))
            known = [(int(token), value) for token, value
                     in zip(top.indices[p, k], top.values[p, k], strict=True)
                     if int(token) in log]  # fmt: skip
            mass = sum(value for _, value in known)
            loss = -sum(share * value / mass * log[token] for token, value in known)
            if target in log:
                loss = loss - (1 - share) * log[target]
            if known or (target in log and share < 1):
                total, count = total + loss, count + 1
        expected = expected + 0.8 ** (k + 1) * total / count
    gradients = torch.autograd.grad(expected, list(heads.parameters()))

    soft = SoftTargets(top.indices, top.values)
    result = heads_loss(heads, hidden_PD, ahead_PJ, 0.8, 5, soft, share)
    found = torch.autograd.grad(result.loss, list(heads.parameters()))
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_the_chunk_bounds_the_largest_block(tiny_base, monkeypatch):
    heads = random_heads(tiny_base(), "shared")
    shapes = []
    project = heads.project
    monkeypatch.setattr(
        heads, "project", lambda z, k: shapes.append(tuple(z.shape)) or project(z, k)
    )
    ahead_PJ = torch.randint(0, 32, (50, 4))
    heads_loss(heads, torch.randn(50, 16), ahead_PJ, 0.8, chunk=8).loss.backward()
    assert max(rows for rows, _ in shapes) == 8
    assert sum(rows for rows, _ in shapes) == 150  # no recomputation in the backward pass


def test_missing_targets_are_counted_and_left_out(tiny_base):
    heads = random_heads(tiny_base(), "reduced")
    hidden_PD = torch.randn(4, 16)
    ahead_PJ = torch.tensor([[7, 0, 1, 2], [7, 3, -1, 2], [7, 1, 4, 2], [7, -1, 5, -1]])
    result = heads_loss(heads, hidden_PD, ahead_PJ, 0.8, 3)
    assert result.missing_K.tolist() == [1, 2, 3]
    assert result.per_head_K[2] == 0
    assert result.per_head_K[0] > 0


def test_no_gradient_is_worked_out_under_no_grad(tiny_base):
    heads = random_heads(tiny_base(), "own")
    with torch.no_grad():
        result = heads_loss(heads, torch.randn(4, 16), torch.randint(0, 32, (4, 4)), 0.8, 3)
    assert not result.loss.requires_grad
    assert result.loss > 0
