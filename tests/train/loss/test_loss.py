"""The chunked loss against the dense one, in float64: values and every gradient."""

import json

import pytest
import torch
from torch.nn import functional as F

from medusa_kit.base.logit_scale import LogitScale
from medusa_kit.heads import MedusaHeads
from medusa_kit.train.loss.chunked import LOSSES, SharedTargets
from medusa_kit.train.loss.loss import (
    LossOptions,
    SoftTargets,
    base_loss,
    heads_loss,
    target_counts,
)
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads

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
@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
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

    result = heads_loss(heads, hidden_PD, ahead_PJ, LossOptions(chunk=5))
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
            loss = -sum((share * value / mass * log[token] for token, value in known), 0.0)
            if target in log:
                loss = loss - (1 - share) * log[target]
            total, count = total + loss, count + 1
        expected = expected + 0.8 ** (k + 1) * total / count
    gradients = torch.autograd.grad(expected, list(heads.parameters()))

    soft = SoftTargets(top.indices, top.values)
    result = heads_loss(heads, hidden_PD, ahead_PJ, LossOptions(0.8, 5, "soft", share), soft)
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
    heads_loss(heads, torch.randn(50, 16), ahead_PJ, LossOptions(chunk=8)).loss.backward()
    assert max(rows for rows, _ in shapes) == 8
    assert sum(rows for rows, _ in shapes) == 150  # no recomputation in the backward pass


def test_missing_targets_are_counted_and_left_out(tiny_base):
    heads = random_heads(tiny_base(), "reduced")
    hidden_PD = torch.randn(4, 16)
    ahead_PJ = torch.tensor([[7, 0, 1, 2], [7, 3, -1, 2], [7, 1, 4, 2], [7, -1, 5, -1]])
    result = heads_loss(heads, hidden_PD, ahead_PJ, LossOptions(chunk=3))
    assert result.missing_K.tolist() == [1, 2, 3]
    assert result.per_head_K[2] == 0
    assert result.per_head_K[0] > 0


def test_no_gradient_is_worked_out_under_no_grad(tiny_base):
    heads = random_heads(tiny_base(), "own")
    with torch.no_grad():
        result = heads_loss(
            heads, torch.randn(4, 16), torch.randint(0, 32, (4, 4)), LossOptions(chunk=3)
        )
    assert not result.loss.requires_grad
    assert result.loss > 0


def random_targets(count=9, columns=12):
    """Five columns share each target; the written token is sometimes among the other four."""
    others_CS = torch.stack([torch.randperm(columns)[:4] for _ in range(count)])
    written_C1 = torch.randint(0, columns, (count, 1))
    shares_CS = torch.rand(count, 5, dtype=torch.float64)
    shares_CS /= shares_CS.sum(1, keepdim=True)
    shares_CS[0] = 0  # a row without a target
    return torch.cat([written_C1, others_CS], 1), shares_CS


def dense_target(columns_CS, shares_CS, columns=12):
    target_CR = torch.zeros(len(columns_CS), columns, dtype=torch.float64)
    return target_CR.scatter_add_(1, columns_CS, shares_CS)


FORMULAS = {
    "cross_entropy": lambda p, q: -(p * q.log()).sum(),
    "soft": lambda p, q: -(p * q.log()).sum(),
    "lk": lambda p, q: -torch.minimum(p, q).sum(1)[p.sum(1) > 0].log().sum(),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_each_loss_equals_its_formula_over_whole_distributions(kind):
    """The formulas are dense and torch differentiates them; the written token may repeat."""
    torch.manual_seed(1)
    columns_CS, shares_CS = random_targets()
    logits_CR = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    expected = FORMULAS[kind](dense_target(columns_CS, shares_CS), logits_CR.softmax(-1))
    (gradient_CR,) = torch.autograd.grad(expected, logits_CR)
    targets = SharedTargets(columns_CS, shares_CS)
    loss, found_CR = LOSSES[kind](logits_CR.detach(), targets)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found_CR, gradient_CR, rtol=1e-8, atol=1e-12)
    assert gradient_CR.abs().max() > 1e-3


def test_what_is_left_over_goes_to_all_other_columns_together():
    torch.manual_seed(2)
    columns_CS, shares_CS = random_targets()
    rest_C = torch.rand(9, dtype=torch.float64)
    logits_CR = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    chance_CR = logits_CR.softmax(-1)
    others_C = chance_CR.scatter(1, columns_CS[:, 1:], 0).sum(1)
    expected = -(dense_target(columns_CS, shares_CS) * chance_CR.log()).sum()
    expected = expected - (rest_C * others_C.log()).sum()
    (gradient_CR,) = torch.autograd.grad(expected, logits_CR)
    targets = SharedTargets(columns_CS, shares_CS, rest_C)
    loss, found_CR = LOSSES["rest"](logits_CR.detach(), targets)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found_CR, gradient_CR, rtol=1e-8, atol=1e-12)


def test_lk_with_hard_targets_is_cross_entropy(tiny_base):
    heads = random_heads(tiny_base(torch.float64), "reduced")
    hidden_PD = torch.randn(11, 16, dtype=torch.float64)
    ahead_PJ = torch.randint(-1, 32, (11, 4))
    entropy, lk = (heads_loss(heads, hidden_PD, ahead_PJ, LossOptions(kind=kind)).loss
                   for kind in ("cross_entropy", "lk"))  # fmt: skip
    torch.testing.assert_close(lk, entropy)


@pytest.mark.parametrize("kind", ["cross_entropy", "lk"])
def test_micro_batches_that_divide_by_the_updates_counts_add_up_to_the_whole(tiny_base, kind):
    heads = random_heads(tiny_base(torch.float64), "reduced")
    hidden_PD = torch.randn(20, 16, dtype=torch.float64)
    ahead_PJ = torch.randint(-1, 32, (20, 4))
    options = LossOptions(kind=kind)
    whole = heads_loss(heads, hidden_PD, ahead_PJ, options)
    counts_K = target_counts(heads, ahead_PJ, soft=False)
    parts = [heads_loss(heads, hidden_PD[rows], ahead_PJ[rows], options, counts_K=counts_K)
             for rows in (slice(0, 3), slice(3, 15), slice(15, 20))]  # fmt: skip
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    torch.testing.assert_close(sum(part.per_head_K for part in parts), whole.per_head_K)


@pytest.mark.parametrize(
    ("share", "with_original"), [(0.0, False), (0.0, True), (0.3, True), (1.0, True)]
)
def test_the_bases_own_loss_is_cross_entropy_and_kl_to_the_original(
    tiny_base, share, with_original
):
    """With all of the vocabulary kept, against torch's own functions; the embedding and its bias
    learn too. The original may have been asked for the heads' sake only."""
    base = tiny_base(torch.float64)
    base.output_embedding.bias = torch.nn.Parameter(torch.randn(32, dtype=torch.float64))
    base.scale_logits = LogitScale(factor=0.5)
    base.model.requires_grad_(True)
    hidden_PD = torch.randn(13, 16, dtype=torch.float64, requires_grad=True)
    roots_P = torch.randint(-1, 32, (13,))
    chances_PV = torch.randn(13, 32, dtype=torch.float64).softmax(-1)
    top = chances_PV.topk(32)
    log_PV = base.head_logits(hidden_PD).log_softmax(-1)
    known_P = roots_P >= 0
    soft = -(chances_PV * log_PV).sum(1)[known_P].mean()
    hard = F.nll_loss(log_PV, roots_P, ignore_index=-1)
    expected = share * soft + (1 - share) * hard
    inputs = [hidden_PD, base.output_embedding.weight, base.output_embedding.bias]
    gradients = torch.autograd.grad(expected, inputs)
    original = SoftTargets(top.indices, top.values) if with_original else None
    options = LossOptions(chunk=4, soft_share=share)
    loss = base_loss(base, hidden_PD, roots_P, options, known_P.sum(), original)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(loss, inputs), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)


def test_a_base_that_says_what_its_original_says_has_nothing_to_learn(tiny_base):
    """The gradient is zero, even though only the likeliest tokens are kept."""
    base = tiny_base(torch.float64)
    hidden_PD = torch.randn(13, 16, dtype=torch.float64, requires_grad=True)
    top = base.head_logits(hidden_PD).softmax(-1).detach().topk(5)
    roots_P = torch.randint(0, 32, (13,))
    options = LossOptions(chunk=4, soft_share=1.0)
    loss = base_loss(base, hidden_PD, roots_P, options, torch.tensor(13), SoftTargets(*top[::-1]))
    (gradient_PD,) = torch.autograd.grad(loss, hidden_PD)
    assert gradient_PD.abs().max() < 1e-12


@pytest.mark.parametrize("reduced", [None, 20])
def test_the_whole_distribution_from_hidden_states_is_that_of_all_likeliest_tokens(
    tiny_base, counting_rows, make_recipe, tmp_path, reduced
):
    """Wherever hidden states are kept, and for part of the target."""
    base, found = tiny_base(), {}
    heads = {"kind": "hydra"}
    if reduced is not None:
        heads |= {"projection": "reduced", "reduced_size": reduced}
    kept = {"soft_top": base.info.vocab_size}
    for name, options in {
        "kept": kept,
        "memory": {},
        "disk": {"features": "disk", "cache_dtype": "float32"},
        "live": {"features": "live"},
        "kept live": {"features": "live", **kept},
    }.items():
        recipe = make_recipe(
            output_dir=str(tmp_path / name.replace(" ", "_")), heads=heads,
            train={"loss": "soft", "soft_share": 0.7, "soft_top": "all", "log_every": 1,
                   "accumulation": 2, "micro_batch_positions": 8, "epochs": 1, **options},
        )  # fmt: skip
        train_heads(base, counting_rows(8, 3, 9), recipe)
        lines = (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()
        found[name] = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    for name, reference in (("memory", "kept"), ("disk", "kept"), ("live", "kept live")):
        assert found[name] == pytest.approx(found[reference], rel=1e-5), name
    assert len(found["kept"]) > 1
