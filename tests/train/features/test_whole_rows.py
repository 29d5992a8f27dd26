"""Heads with a prefix layer: what they read in training, where it is kept, what they learn."""

import json

import pytest
import torch

from medusa_kit.base.loading import load_base_model
from medusa_kit.data.chat import EncodedExample
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.heads import MedusaHeads, load_heads
from medusa_kit.train.batching import Batch
from medusa_kit.train.data import prepare
from medusa_kit.train.evaluate import answer_starts
from medusa_kit.train.features.features import FeatureOptions, collect_features
from medusa_kit.train.features.rows import Rows
from medusa_kit.train.features.whole_rows import WholeRows, read_rows
from medusa_kit.train.loss.loss import LossOptions, heads_loss
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.stages import Medusa1
from medusa_kit.train.trainer import train_heads


def random_heads(base, kind="hydra"):
    torch.manual_seed(1)
    heads = MedusaHeads.for_base(base, 3, kind=kind, prefix_layers=1)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def uneven_rows(counting_rows):
    """Of different lengths; the last one has two answers."""
    two = EncodedExample(list(range(20)), [False, True, True] + [False] * 5 + [True] * 12, 9)
    return [*counting_rows(2, 2, 9), *counting_rows(2, 6, 14), two]


def losses(recipe):
    lines = (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_of_rows_has_the_loss_and_the_gradients_of_each_row_alone(
    tiny_base, counting_rows, packing
):
    base = tiny_base(torch.float64)
    heads = random_heads(base)
    items = prepare(uneven_rows(counting_rows), 3)
    read, ahead = [], []
    for item in items:
        hidden_1TD = base.hidden_states(torch.tensor([item.input_ids]))
        read.append(heads.with_prefix(hidden_1TD)[0, item.positions_P])
        ahead.append(torch.from_numpy(item.ahead_PJ))
    expected = heads_loss(heads, torch.cat(read), torch.cat(ahead), LossOptions()).loss
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in heads.named_parameters()}
    heads.zero_grad()

    rows = [item.whole_row() for item in items]
    hidden_TD = Rows.of(rows, base.device, packing).hidden_PD(base)
    ahead_PJ = torch.cat(ahead)
    batch = Batch(ahead_PJ, hidden_TD, whole=WholeRows.of(rows))
    stage = Medusa1(heads, LossOptions())
    loss = stage(batch, stage.terms(ahead_PJ, 1.0)).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)
        assert gradients[name].abs().max() > 0, name


def test_held_out_rows_are_read_as_each_row_alone(tiny_base, counting_rows):
    base = tiny_base(torch.float64)
    heads = random_heads(base)
    items = sorted(prepare(uneven_rows(counting_rows), 3), key=lambda item: -item.positions_P[-1])
    rows = [item.whole_row() for item in items]
    store = collect_features(base, rows, FeatureOptions(30))
    found = read_rows(heads, store, rows, batch_tokens=30)
    expected = torch.cat([
        heads.with_prefix(base.hidden_states(torch.tensor([item.input_ids])))[0, item.positions_P]
        for item in items
    ])  # fmt: skip
    torch.testing.assert_close(found.hidden_PD, expected, rtol=1e-10, atol=1e-12)
    ahead_PJ = torch.cat([torch.from_numpy(item.ahead_PJ) for item in items])
    assert torch.equal(found.ahead_PJ, ahead_PJ)
    assert answer_starts(rows).tolist() == answer_starts(items).tolist()
    assert len(answer_starts(rows)) == len(items) + 1


@pytest.mark.parametrize("loss", [{}, {"loss": "soft", "soft_share": 0.5, "soft_top": 4}])
def test_rows_from_memory_and_disk_and_the_base_itself_give_the_same_losses(
    tiny_base, counting_rows, make_recipe, tmp_path, capsys, loss
):
    base, rows, found = tiny_base(), [*uneven_rows(counting_rows), *counting_rows(5)], {}
    sources = {
        "memory": {},
        "disk": {"features": "disk", "cache_dtype": "float32"},
        "live": {"features": "live"},
        "packed": {"packing": True},
    }
    for name, options in sources.items():
        recipe = make_recipe(
            output_dir=str(tmp_path / name), heads={"kind": "hydra", "prefix_layers": 1},
            train={"log_every": 1, "accumulation": 2, "micro_batch_positions": 20, "keep": "last",
                   **loss, **options},
        )  # fmt: skip
        report = train_heads(base, rows, recipe)
        weights = load_heads(report.heads_folder, base).state_dict()
        found[name] = losses(recipe), float(weights["prefix.wo.weight"].abs().sum())
    said = capsys.readouterr().err
    assert "tokens of whole rows (" in said
    assert "tokens of whole rows (" in said.split("hidden states on disk: ")[1].splitlines()[0]
    for name in sources:
        assert found[name][0] == pytest.approx(found["memory"][0], rel=1e-5), name
        assert found[name][1] == pytest.approx(found["memory"][1], rel=1e-3), name
    assert found["memory"][1] > 0.1


def test_a_cache_of_the_other_sort_is_refused(tiny_base, counting_rows, make_recipe, tmp_path):
    base, cache = tiny_base(), str(tmp_path / "cache")
    found = []
    for prefix_layers in (0, 1):
        recipe = make_recipe(
            output_dir=str(tmp_path / str(prefix_layers)), heads={"prefix_layers": prefix_layers},
            train={"features": "disk", "cache_dir": cache, "epochs": 1},
        )  # fmt: skip
        found.append(recipe)
    train_heads(base, counting_rows(), found[0])
    with pytest.raises(IncompatibleBaseError, match="whole_rows True ≠ False") as caught:
        train_heads(base, counting_rows(), found[1])
    assert "cache_dir" in caught.value.hint


def far_rows():
    """The first token of a prompt says which of two ends the answer; the others are noise."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for row in range(60):
        noise = torch.randint(3, 10, (4,), generator=generator).tolist()
        ids = [row % 2 + 1, *noise, 20, row % 2 + 10]
        rows.append(EncodedExample(ids, [False] * 5 + [True] * 2, row + 1))
    return rows


def test_a_prefix_layer_finds_what_the_hidden_state_does_not_carry(
    tiny_base, make_recipe, tmp_path
):
    base, top1 = tiny_base(), {}
    for layer in base.model.model.layers:  # hidden states are then of their own token alone
        layer.self_attn.o_proj.weight.data.zero_()
    for prefix_layers in (0, 1):
        recipe = make_recipe(
            output_dir=str(tmp_path / str(prefix_layers)),
            heads={"num_heads": 1, "prefix_layers": prefix_layers},
            train={"epochs": 40, "learning_rate": 0.02, "eval_every": 1000},
        )  # fmt: skip
        top1[prefix_layers] = train_heads(base, far_rows(), recipe).scores.top1[0]
    assert top1[0] < 0.8
    assert top1[1] > 0.95


def test_medusa2_moves_the_base_through_the_prefix_layer(make_recipe, counting_rows, tmp_path):
    """Cut into micro-batches or packed, the same losses; heads of a run without it are refused."""
    found = {}
    ways = {
        "whole": {"micro_batch_positions": 100},
        "cut": {"micro_batch_positions": 50, "accumulation": 2},
        "packed": {"micro_batch_positions": 100, "packing": True},
    }
    for name, options in ways.items():
        recipe = make_recipe(
            stage="medusa2", output_dir=str(tmp_path / name), base={"model": "debug-tiny"},
            heads={"num_heads": 2, "prefix_layers": 1}, train={**options, "log_every": 1},
            joint={"moves": "lora", "distill_share": 0.5},
        )  # fmt: skip
        report = train_heads(load_base_model("debug-tiny"), counting_rows(), recipe)
        found[name] = losses(recipe)
    assert found["cut"] == pytest.approx(found["whole"], rel=1e-5)
    assert found["packed"] == pytest.approx(found["whole"], rel=1e-4)
    assert found["whole"][-1] < found["whole"][0]

    alone = make_recipe(output_dir=str(tmp_path / "alone"), heads={"num_heads": 2})
    base = load_base_model("debug-tiny")
    folder = train_heads(base, counting_rows(), alone).heads_folder
    train = recipe.train.model_copy(update={"heads_from": str(folder)})
    with pytest.raises(ConfigError, match=r"prefix_layers is 0; heads\.prefix_layers is 1"):
        train_heads(base, counting_rows(), recipe.model_copy(update={
            "train": train, "output_dir": str(tmp_path / "refused")}))  # fmt: skip
    assert report.quality is not None
