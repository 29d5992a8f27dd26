"""Cross-entropy by a library against the chunked code.

Without a GPU a module that computes densely replaces each library, with the same signature; the
libraries themselves run in the test marked gpu.
"""

import importlib.util
import json
import sys
import types

import pytest
import torch
from torch.nn import functional as F

from medusa_kit.base.model import LogitScale
from medusa_kit.errors import ConfigError
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.cuda_graph.guard import NoHostReads
from medusa_kit.train import trainer
from medusa_kit.train.loss import fused as fused_loss
from medusa_kit.train.loss.loss import LossOptions, SoftTargets, base_loss, heads_loss
from medusa_kit.train.trainer import train, train_heads

CUDA = torch.device("cuda")


def dense(z_PD, weight_RD, targets_P, bias_R, softcap, ignore_index, reduction):
    logits_PR = F.linear(z_PD, weight_RD, bias_R)
    if softcap is not None:
        logits_PR = torch.tanh(logits_PR / softcap) * softcap
    return F.cross_entropy(logits_PR, targets_P, ignore_index=ignore_index, reduction=reduction)


def fused_linear_cross_entropy_forward(
    _input, weight, target, ce_weight=None, bias=None, ignore_index=-100, lse_square_scale=0.0,
    label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
):  # fmt: skip
    """As Liger's: gradients come with the loss, and the targets are counted on the host."""
    CALLS.append("liger")
    assert accum_dtype == torch.float32, "gradients would be summed in 16 bits"
    assert (target != ignore_index).sum().item() > 0 or reduction == "sum"
    given = [_input, weight, *([] if bias is None else [bias])]
    graded = [tensor for tensor in given if tensor.requires_grad]
    with torch.enable_grad():
        loss = dense(_input, weight, target, bias, softcap, ignore_index, reduction)
        found = iter(torch.autograd.grad(loss, graded) if graded else [])
    gradients = [next(found) if tensor.requires_grad else None for tensor in given]
    return loss.detach(), None, None, None, *gradients, *([None] if bias is None else [])


def linear_cross_entropy(
    e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0,
    filter_eps="auto", accum_e_fp32=False, accum_c_fp32=False, filter_e_grad=True,
    filter_c_grad=True, impl="cce",
):  # fmt: skip
    assert filter_eps is None, "the filter leaves small gradients out"
    assert accum_e_fp32, "gradients would be summed in 16 bits"
    assert accum_c_fp32, "gradients would be summed in 16 bits"
    assert (targets != ignore_index).any(), "it cannot be asked about nothing"
    CALLS.append("cut_cross_entropy")
    return dense(e, c, targets, bias, softcap, ignore_index, reduction)


def older_linear_cross_entropy(
    e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False,
    filter_eps="high", impl="cce",
):  # fmt: skip
    """The release on the package index."""


CALLS = []
STAND_INS = {
    "liger_kernel.ops.fused_linear_cross_entropy": fused_linear_cross_entropy_forward,
    "cut_cross_entropy": linear_cross_entropy,
}


@pytest.fixture
def stand_ins(monkeypatch):
    CALLS.clear()
    for name, function in STAND_INS.items():
        module = types.ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def on_cuda(stand_ins, monkeypatch):
    """Every device counts as one that the libraries run on."""
    monkeypatch.setattr(fused_loss, "_absent", lambda *_: None)


def both(heads, hidden_PD, ahead_PJ, library):
    """[(loss, per head, gradients)] of the chunked path and of a library."""
    found = []
    for fused in (None, library):
        result = heads_loss(heads, hidden_PD, ahead_PJ, LossOptions(chunk=5, fused=fused))
        gradients = torch.autograd.grad(result.loss, list(heads.parameters()))
        found.append((result.loss, result.per_head_K, result.missing_K, *gradients))
    return found


@pytest.mark.parametrize("library", fused_loss.LIBRARIES)
@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
@pytest.mark.parametrize("capped", [False, True], ids=["plain", "scaled and capped"])
def test_a_library_gives_the_chunked_loss(tiny_base, stand_ins, library, projection, capped):
    """With missing targets, targets without a column, the update's counts and the base's scale."""
    base = tiny_base(torch.float64)
    if capped:
        base.scale_logits = LogitScale(3.0, 2.0, 2.0)
    ids_R = torch.tensor([0, 3, 4, 9, 15, 16, 30]) if projection == "reduced" else None
    heads = MedusaHeads.for_base(base, 3, 1, projection, ids_R, "hydra")
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ahead_PJ = torch.randint(-1, 32, (23, 4))
    ahead_PJ[:, 3] = -1  # a head without any target
    ours, theirs = both(heads, torch.randn(23, 16, dtype=torch.float64), ahead_PJ, library)
    assert [library] * (3 if library == "liger" else 2) == CALLS
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_liger_is_run_without_waiting_for_the_device(tiny_base, stand_ins):
    """Forward and backward, also where a part of an update holds no target."""
    heads = MedusaHeads.for_base(tiny_base(), 3, 1, "own", None, "hydra")
    ahead_PJ = torch.randint(-1, 32, (23, 4))
    ahead_PJ[:, 3] = -1
    counts_K = torch.tensor([20, 20, 0])
    with NoHostReads():
        result = heads_loss(
            heads, torch.randn(23, 16), ahead_PJ, LossOptions(fused="liger"), counts_K=counts_K
        )
        gradients = torch.autograd.grad(result.loss, list(heads.parameters()))
    assert CALLS == ["liger"] * 3
    assert all(gradient.isfinite().all() for gradient in gradients)
    with torch.no_grad():
        again = heads_loss(
            heads, torch.randn(23, 16), ahead_PJ, LossOptions(fused="liger"), counts_K=counts_K
        )
    assert not again.loss.requires_grad


def test_a_library_runs_on_the_device_of_what_it_is_given(tiny_base, stand_ins, monkeypatch):
    """Triton's kernels start on the current device, which with several GPUs may be another."""
    entered = []

    class Guard:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            entered.append(self.tensor)

        def __exit__(self, *_):
            assert len(CALLS) == 1

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    z_PD = torch.randn(5, 16)
    columns = fused_loss.base_columns(tiny_base())
    fused_loss.summed("liger", z_PD, torch.tensor([1, 2, -1, 4, 5]), columns)
    assert [tensor.shape for tensor in entered] == [z_PD.shape]


@pytest.mark.parametrize("with_original", [False, True])
def test_a_library_gives_the_bases_own_loss(tiny_base, stand_ins, with_original):
    """Also where the original was asked for the heads' sake only; the bias is learned with it."""
    base = tiny_base(torch.float64)
    base.output_embedding.bias = torch.nn.Parameter(torch.randn(32, dtype=torch.float64))
    base.scale_logits = LogitScale(factor=0.5)
    base.model.requires_grad_(True)
    hidden_PD = torch.randn(13, 16, dtype=torch.float64, requires_grad=True)
    roots_P = torch.randint(-1, 32, (13,))
    top = torch.randn(13, 32, dtype=torch.float64).softmax(-1).topk(5)
    original = SoftTargets(top.indices, top.values) if with_original else None
    inputs = [hidden_PD, base.output_embedding.weight]
    found = []
    for fused in (None, "liger"):
        options = LossOptions(chunk=4, fused=fused)
        loss = base_loss(base, hidden_PD, roots_P, options, torch.tensor(40), original)
        wanted = [*inputs, base.output_embedding.bias]
        found.append((loss, *torch.autograd.grad(loss, wanted)))
    assert CALLS == ["liger"]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_a_run_by_a_library_is_the_run_without(
    tiny_base, counting_rows, make_recipe, on_cuda, tmp_path
):
    """`auto` uses one where it can; soft targets stay with the chunked code."""
    losses = {}
    short = {"log_every": 1, "epochs": 1}
    runs = {"chunked": {"fused_loss": "never"}, "fused": {}, "soft": {"loss": "soft"}}
    for name, changes in runs.items():
        CALLS.clear()
        recipe = make_recipe(output_dir=str(tmp_path / name), train=short | changes)
        train_heads(tiny_base(), counting_rows(), recipe)
        assert set(CALLS) == ({"liger"} if name == "fused" else set())
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses[name] = [line["loss"] for line in lines if "loss" in line]
    assert losses["fused"] == pytest.approx(losses["chunked"], rel=1e-5)
    assert len(losses["fused"]) > 2


def test_a_library_that_does_not_run_here_is_refused_before_the_base_is_loaded(
    make_recipe, monkeypatch
):
    monkeypatch.setattr(trainer, "load_base", None)
    with pytest.raises(ConfigError, match="the device is cpu") as caught:
        train(make_recipe(base={"model": "x", "device": "cpu"}, train={"fused_loss": "liger"}))
    assert "medusa-kit[fused]" in (caught.value.hint or "")


def test_a_library_that_is_not_installed_is_refused(make_recipe, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    recipe = make_recipe(train={"fused_loss": "cut_cross_entropy"})
    with pytest.raises(ConfigError, match="cut_cross_entropy is not installed") as caught:
        fused_loss.check_named(recipe, CUDA)
    assert "from source" in (caught.value.hint or "")
    fused_loss.check_named(make_recipe(), CUDA)  # auto: the chunked path


def test_a_release_that_sums_gradients_in_16_bits_is_refused(make_recipe, stand_ins, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    recipe = make_recipe(train={"fused_loss": "cut_cross_entropy"})
    fused_loss.check_named(recipe, CUDA)
    older = sys.modules["cut_cross_entropy"]
    monkeypatch.setattr(older, "linear_cross_entropy", older_linear_cross_entropy)
    with pytest.raises(
        ConfigError, match=r"in the 16 bits .* \(no accum_c_fp32, accum_e"
    ) as caught:
        fused_loss.check_named(recipe, CUDA)
    assert "from source" in (caught.value.hint or "")


ZERO_3 = {"deepspeed": {"zero_stage": 3}}
JOINT = {"stage": "medusa2", "joint": {"moves": "lora", "distill_share": 0.0}}


@pytest.mark.parametrize(
    ("sections", "train", "words"),
    [
        ({}, {"loss": "soft"}, "train.loss 'soft': it computes"),
        ({"stage": "medusa2"}, {"loss": "lk"}, "train.loss 'lk'"),
        (ZERO_3, {}, "zero_stage 3"),
        ({}, {"fused_loss": "cut_cross_entropy"}, "in float32, expected one of bfloat16"),
        (JOINT, {"loss": "soft", "fused_loss": "cut_cross_entropy"}, "in float32"),
    ],
)
def test_what_a_library_cannot_do_is_refused_by_name_and_left_by_auto(
    tiny_base, make_recipe, on_cuda, sections, train, words
):
    heads = MedusaHeads.for_base(tiny_base(), 2)
    with pytest.raises(ConfigError, match=words) as caught:
        fused_loss.choose(make_recipe(**sections, train={"fused_loss": "liger"} | train), heads)
    assert caught.value.hint
    chosen = fused_loss.choose(make_recipe(**sections, train=train | {"fused_loss": "auto"}), heads)
    assert chosen == (None if "fused_loss" not in train else "liger")


def test_a_projection_that_no_library_knows_is_left_alone(tiny_base, make_recipe, on_cuda):
    base = tiny_base(torch.bfloat16)
    heads = MedusaHeads.for_base(base, 2)
    named = make_recipe(train={"fused_loss": "cut_cross_entropy"})
    assert fused_loss.choose(named, heads) == "cut_cross_entropy"
    base.output_embedding.bias = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(ConfigError, match="has a bias"):
        fused_loss.choose(named, heads)
    assert fused_loss.choose(make_recipe(), heads) == "liger"
    base.scale_logits = lambda logits: logits
    assert fused_loss.choose(make_recipe(), heads) is None
    base.scale_logits = LogitScale()
    base.model.lm_head.__class__ = type("Quantised", (torch.nn.Linear,), {})
    assert fused_loss.choose(make_recipe(), heads) is None


@pytest.mark.gpu
@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
@pytest.mark.parametrize("library", fused_loss.LIBRARIES)
def test_the_library_itself_gives_the_chunked_loss(tiny_base, library, projection):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if reason := fused_loss._absent(library, torch.device("cuda", 0)):
        pytest.skip(reason)
    half = library == "cut_cross_entropy"
    base = tiny_base(torch.bfloat16 if half else torch.float32)
    base.model.cuda()
    ids_R = torch.arange(0, 32, 2) if projection == "reduced" else None
    heads = MedusaHeads.for_base(base, 3, 1, projection, ids_R)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden_PD, ahead_PJ = torch.randn(300, 16).cuda(), torch.randint(-1, 32, (300, 4)).cuda()
    ours, theirs = both(heads, hidden_PD, ahead_PJ, library)
    for one, other in zip(ours, theirs, strict=True):
        error = (one.float() - other.float()).abs().max()
        assert error <= (0.03 if half else 1e-4) * one.float().abs().max()
