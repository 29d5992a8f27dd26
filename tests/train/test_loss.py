"""The chunked loss against the dense one, in float64: values and every gradient."""

import pytest
import torch
from torch.nn import functional as F

from medusa_kit.heads import MedusaHeads
from medusa_kit.train.loss import heads_loss

REDUCED = torch.tensor([0, 3, 4, 9, 15, 16, 30])


def dense_loss(heads, hidden_PD, targets_PK, decay):
    """The formula, written with full logits and torch's own cross-entropy."""
    total, per_head = 0.0, []
    for k in range(heads.num_heads):
        logits_PR = heads.project(heads.transform(hidden_PD, k), k)
        targets_P = targets_PK[:, k].clone()
        if heads.column_ids is not None:
            table = {int(token): column for column, token in enumerate(heads.column_ids)}
            targets_P = torch.tensor([table.get(int(token), -1) for token in targets_P])
        loss = F.cross_entropy(logits_PR, targets_P, ignore_index=-1)
        per_head.append(loss.detach())
        total = total + decay ** (k + 1) * loss
    return total, torch.stack(per_head)


def random_heads(base, projection):
    ids_R = REDUCED if projection == "reduced" else None
    heads = MedusaHeads.for_base(base, 3, 2, projection, ids_R)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
@pytest.mark.parametrize("capped", [False, True], ids=["plain", "scaled and capped"])
def test_loss_and_gradients_equal_the_dense_ones(tiny_base, projection, capped):
    base = tiny_base(torch.float64)
    if capped:
        base.scale_logits = lambda logits: torch.tanh(logits * 3 / 2.0) * 2.0
    heads = random_heads(base, projection)
    hidden_PD = torch.randn(23, 16, dtype=torch.float64)
    targets_PK = torch.randint(-1, 32, (23, 3))

    expected, per_head_K = dense_loss(heads, hidden_PD, targets_PK, 0.8)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad()

    result = heads_loss(heads, hidden_PD, targets_PK, decay=0.8, chunk=5)
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.per_head_K, per_head_K, rtol=1e-12, atol=1e-12)
    for parameter, gradient in zip(heads.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        assert gradient.abs().max() > 0


def test_the_chunk_bounds_the_largest_block(tiny_base, monkeypatch):
    heads = random_heads(tiny_base(), "shared")
    shapes = []
    project = heads.project
    monkeypatch.setattr(
        heads, "project", lambda z, k: shapes.append(tuple(z.shape)) or project(z, k)
    )
    targets_PK = torch.randint(0, 32, (50, 3))
    heads_loss(heads, torch.randn(50, 16), targets_PK, 0.8, chunk=8).loss.backward()
    assert max(rows for rows, _ in shapes) == 8
    assert sum(rows for rows, _ in shapes) == 150  # no recomputation in the backward pass


def test_missing_targets_are_counted_and_left_out(tiny_base):
    heads = random_heads(tiny_base(), "reduced")
    hidden_PD = torch.randn(4, 16)
    targets_PK = torch.tensor([[0, 1, 2], [3, -1, 2], [1, 4, 2], [-1, 5, -1]])
    result = heads_loss(heads, hidden_PD, targets_PK, 0.8, 3)
    assert result.missing_K.tolist() == [1, 2, 3]
    assert result.per_head_K[2] == 0
    assert result.per_head_K[0] > 0


def test_no_gradient_is_worked_out_under_no_grad(tiny_base):
    heads = random_heads(tiny_base(), "own")
    with torch.no_grad():
        result = heads_loss(heads, torch.randn(4, 16), torch.randint(0, 32, (4, 3)), 0.8, 3)
    assert not result.loss.requires_grad
    assert result.loss > 0
