"""Runners-up: their hidden states are the base's own, and heads learn from them."""

import json

import numpy as np
import pytest
import torch
from support.tiny_models import PROMISED, model_of, tiny_model
from support.tiny_models import tiny_base as base_of
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import wrap_model
from medusa_kit.data.chat import EncodedExample
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.heads import MedusaHeads, load_heads
from medusa_kit.infer.attention import install_tree_attention
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.data import on_all_tokens, prepare
from medusa_kit.train.features import runners_up
from medusa_kit.train.features.features import FeatureOptions, Positions, run
from medusa_kit.train.features.runners_up import (
    AMONG,
    check_runners_up,
    read_with_runners_up,
)
from medusa_kit.train.loss.loss import LossOptions, SoftHidden, heads_loss
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads

SOFT = {"loss": "soft", "soft_share": 1, "soft_top": "all", "runners_up": True}
RECURRENT = {"kind": "recurrent", "num_heads": 3, "mlp_size": 24, "projection": "shared"}


def random_rows(lengths, vocab_size, first_trained=3):
    generator = np.random.default_rng(5)
    rows = []
    for number, length in enumerate(lengths, start=1):
        ids = generator.integers(3, vocab_size, length).tolist()
        rows.append(EncodedExample(ids, [i >= first_trained for i in range(length)], number))
    return rows


@pytest.mark.parametrize("family", PROMISED)
def test_hidden_states_are_those_of_the_text_with_that_token(family):
    """Each row of different length is read anew up to each token, with the other one at its end."""
    base = base_of(family)
    items = prepare(random_rows([9, 17, 12], base.info.vocab_size), 2)
    check_runners_up(base, items)
    found = read_with_runners_up(base, items)
    assert_read_as_texts(base, items, found)


def assert_read_as_texts(base, items, found):
    at = 0
    for item in items:
        for place in item.positions_P.tolist():
            other, text = int(found.others_P1[at]), item.input_ids[: place + 1]
            own_1TD = base.hidden_states(torch.tensor([text]))
            torch.testing.assert_close(found.hidden_PD[at], own_1TD[0, -1], rtol=1e-3, atol=1e-4)
            assert other != text[-1]
            instead_1TD = base.hidden_states(torch.tensor([[*text[:-1], other]]))
            expected_D = instead_1TD[0, -1]
            torch.testing.assert_close(found.others_PD[at], expected_D, rtol=1e-3, atol=1e-4)
            at += 1
    assert at == len(found.hidden_PD)


def test_they_are_among_the_likeliest_and_follow_from_the_row_alone():
    base = base_of("llama")
    rows = random_rows([14] * 40, base.info.vocab_size)
    items = prepare(rows, 2)
    found, at, ranks = read_with_runners_up(base, items), 0, []
    for item in items:
        logits_1TV = base.model(torch.tensor([item.input_ids])).logits
        for place in item.positions_P.tolist():
            order = logits_1TV[0, place - 1].argsort(descending=True).tolist()
            order.remove(item.input_ids[place])
            ranks.append(order.index(int(found.others_P1[at])))
            at += 1
    assert set(ranks) == set(range(AMONG))
    counts = np.bincount(ranks)
    assert counts[0] == counts.max()
    alone = read_with_runners_up(base, items[7:8])
    start = sum(len(item.positions_P) for item in items[:7])
    same = slice(start, start + len(items[7].positions_P))
    assert torch.equal(alone.others_P1, found.others_P1[same])


def test_a_row_trained_on_from_its_first_token_keeps_that_token():
    base = base_of("llama")
    items = on_all_tokens(prepare(random_rows([8, 8], base.info.vocab_size), 2))
    assert items[0].positions_P[0] == 0
    found = read_with_runners_up(base, items)
    assert int(found.others_P1[0]) == items[0].input_ids[0]
    torch.testing.assert_close(found.others_PD[0], found.hidden_PD[0], rtol=1e-4, atol=1e-5)


WINDOWED = ["mistral-sliding", "gemma3", "gemma2", "gpt_oss", "cohere2", "olmo3", "starcoder2"]


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_shorter_than_the_rows_hide_what_they_hide_in_a_text(family):
    base = base_of(family)
    window = base.model.config.get_text_config().sliding_window
    items = prepare(random_rows([4 * window, window + 1], base.info.vocab_size), 2)
    check_runners_up(base, items)
    found = read_with_runners_up(base, items)
    assert_read_as_texts(base, items, found)


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
def test_a_model_that_trees_were_verified_on_reads_runners_up(family):
    """With tree attention, which heads are checked with before training."""
    base = base_of(family)
    items = prepare(random_rows([40, 21], base.info.vocab_size), 2)
    before = read_with_runners_up(base, items)
    install_tree_attention(base.model)
    check_runners_up(base, items)
    found = read_with_runners_up(base, items)
    torch.testing.assert_close(found.others_PD, before.others_PD, rtol=1e-4, atol=1e-5)
    assert_read_as_texts(base, items, found)


def without_window(mask):
    return lambda base, num_rows, length, window: mask(base, num_rows, length, length)


@pytest.mark.parametrize("length", [40, 41])
def test_a_window_that_hides_one_token_unknown_to_us_is_refused(length, monkeypatch):
    base = wrap_model(tiny_model("mistral-sliding", sliding_window=length - 1), None, "tiny")
    items = prepare(random_rows([length], base.info.vocab_size), 2)
    check_runners_up(base, items)
    monkeypatch.setattr(runners_up, "_mask", without_window(runners_up._mask))
    with pytest.raises(IncompatibleBaseError, match=f"row of {length} tokens") as caught:
        check_runners_up(base, items)
    assert "data.max_length" in str(caught.value.hint)


def test_in_16_bits_the_worst_position_counts(monkeypatch):
    """Rounding passes; a window four tokens short spoils a few positions only."""
    model = tiny_model("mistral-sliding", sliding_window=36).to(torch.bfloat16)
    base = wrap_model(model, None, "tiny")
    items = prepare(random_rows([40], base.info.vocab_size), 2)
    check_runners_up(base, items)
    monkeypatch.setattr(runners_up, "_mask", without_window(runners_up._mask))
    with pytest.raises(IncompatibleBaseError, match="read as a runner-up"):
        check_runners_up(base, items)


def test_models_that_take_no_cache_or_mask_are_refused():
    """This one reads any tokens one after the other, whatever it is given beside them."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "mamba2", vocab_size=96, hidden_size=32, num_heads=8, head_dim=8, state_size=8,
            n_groups=1, num_hidden_layers=2, expand=2,
        )
    ).eval()  # fmt: skip
    base = wrap_model(model, None, "tiny-mamba2")
    with pytest.raises(IncompatibleBaseError):
        check_runners_up(base, prepare(random_rows([12], 96), 2))


def test_a_base_of_packed_weights_is_refused(tmp_path):
    folder = tmp_path / "llama"
    model_of("llama").save_pretrained(folder)
    base = base_for_decoding(str(folder), dtype="float32", device="cpu")
    if not base.is_light:
        pytest.skip("steps do not run in C++ here")
    with pytest.raises(IncompatibleBaseError, match="only a model of torch") as caught:
        check_runners_up(base, prepare(random_rows([12], base.info.vocab_size), 2))
    assert "load_base_model" in str(caught.value.hint)


@pytest.mark.parametrize("kind", ["recurrent", "hydra"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_loss_is_the_mean_of_both_paths(tiny_base, kind, share):
    base = tiny_base(torch.float64)
    heads = MedusaHeads.for_base(base, 3, 1, "shared", None, kind)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    P, K, D = 23, 3, 16
    hidden_PD = torch.randn(P, D, dtype=torch.float64)
    ahead_PJ = torch.randint(0, 32, (P, K + 1))
    ahead_PJ[5:8, 2:] = -1
    soft = SoftHidden(
        torch.randn(P, K, D, dtype=torch.float64),
        torch.randint(0, 32, (P, K)),
        torch.randn(P, K, D, dtype=torch.float64),
    )
    options = LossOptions(chunk=7, kind="soft", soft_share=share)
    result = heads_loss(heads, hidden_PD, ahead_PJ, options, soft)
    result.loss.backward()
    gradients = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad()

    total = 0.0
    for k in range(K):
        known_P = ahead_PJ[:, k + 1] >= 0
        path_PJ = ahead_PJ.clone()
        path_PJ[:, k] = soft.others_PK[:, k]
        parts = []
        for path, target_PD, of_base in (
            (ahead_PJ, soft.hidden_PKD[:, k], share),
            (path_PJ, soft.others_PKD[:, k], 1.0),
        ):
            log_PV = heads.project(heads.transform(hidden_PD, k, path), k).log_softmax(-1)
            target_PV = of_base * base.head_logits(target_PD).softmax(-1)
            hard_PV = F.one_hot(ahead_PJ[:, k + 1].clamp_min(0), 32)
            target_PV = target_PV + (1 - of_base) * hard_PV
            parts.append(-(target_PV * log_PV).sum(-1)[known_P].mean())
        total = total + 0.8 ** (k + 1) * sum(parts) / 2
    total.backward()
    torch.testing.assert_close(result.loss, total)
    for parameter, gradient in zip(heads.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def losses(recipe):
    lines = (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def test_runs_from_memory_disk_and_live_are_the_same(
    tiny_base, counting_rows, make_recipe, tmp_path
):
    """With one update an epoch all train on the same positions."""
    base, rows, found = tiny_base(), counting_rows(), {}
    for features in ("memory", "disk", "live"):
        train = {**SOFT, "features": features, "micro_batch_positions": 1000, "log_every": 1}
        train |= {"cache_dtype": "float32"} if features == "disk" else {}
        recipe = make_recipe(output_dir=str(tmp_path / features), train=train, heads=RECURRENT)
        report = train_heads(base, rows, recipe)
        found[features] = losses(recipe)
        assert load_heads(report.heads_folder, base).num_heads == 3
    assert found["disk"] == pytest.approx(found["memory"], rel=1e-4)
    assert found["live"] == pytest.approx(found["memory"], rel=1e-4)
    without = make_recipe(
        output_dir=str(tmp_path / "without"), heads=RECURRENT,
        train={**SOFT, "runners_up": False, "micro_batch_positions": 1000, "log_every": 1},
    )  # fmt: skip
    train_heads(base, rows, without)
    assert losses(without) != pytest.approx(found["memory"], rel=1e-4)


def test_a_cache_without_them_is_refused(tiny_base, counting_rows, make_recipe, tmp_path):
    base, rows = tiny_base(), counting_rows()

    def recipe(name, runners_up):
        train = {**SOFT, "runners_up": runners_up, "features": "disk", "epochs": 1}
        train |= {"cache_dir": str(tmp_path / "cache")}
        return make_recipe(output_dir=str(tmp_path / name), train=train, heads=RECURRENT)

    train_heads(base, rows, recipe("one", False))
    with pytest.raises(IncompatibleBaseError, match="runners_up True ≠ False"):
        train_heads(base, rows, recipe("two", True))


@pytest.mark.parametrize("first", [False, True])
def test_shards_of_another_kind_are_refused_where_the_index_is_lost(
    tiny_base, counting_rows, make_recipe, tmp_path, first
):
    base, rows = tiny_base(), counting_rows()

    def run(name, runners_up):
        train = {**SOFT, "runners_up": runners_up, "features": "disk", "epochs": 1}
        train |= {"cache_dir": str(tmp_path / "shared"), "cache_dtype": "float32", "log_every": 1}
        train_heads(
            base, rows, make_recipe(output_dir=str(tmp_path / name), train=train, heads=RECURRENT)
        )

    run("one", first)
    (tmp_path / "shared" / "index.json").unlink()
    with pytest.raises(IncompatibleBaseError, match=f"runners_up {not first} ≠ {first}"):
        run("two", not first)
    run("three", first)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        (["train.soft_top=32"], "train.soft_top 'all'"),
        (["heads.kind=medusa"], "heads.kind 'recurrent' or 'hydra'"),
        (["train.packing=true"], "rows side by side"),
        (["deepspeed.enabled=true", "deepspeed.zero_stage=3"], "zero_stage 0, 1 or 2"),
    ],
)
def test_recipes_that_cannot_have_them_are_refused(tmp_path, changes, missing):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "output_dir: run\nbase: {model: m}\nheads: {kind: recurrent}\n"
        "data: {sources: [rows.jsonl]}\ndeepspeed: {enabled: false}\n"
        "train: {loss: soft, soft_top: all, runners_up: true}\n"
    )
    assert load_recipe(path).train.runners_up
    with pytest.raises(ConfigError, match=missing.replace("(", r"\(")):
        load_recipe(path, changes)


def test_positions_without_them_have_no_columns(tiny_base, counting_rows):
    base, items = tiny_base(), prepare(counting_rows(2), 2)
    plain: Positions = run(base, items, FeatureOptions(1000))
    assert plain.others_P1.shape[1] == plain.others_PD.shape[1] == 0
    rows_P = torch.arange(3)
    assert plain.soft_hidden(rows_P).others_PK is None
    with_them = run(base, items, FeatureOptions(1000, runners_up=True))
    assert with_them.soft_hidden(rows_P).others_PKD.shape == (3, 2, 16)
