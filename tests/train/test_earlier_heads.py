"""Training goes on from earlier heads, and recurrent heads become more."""

import json
import shutil

import pytest
import torch
from pydantic import ValidationError

from medusa_kit.base.model import wrap_model
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError
from medusa_kit.heads import MedusaHeads, load_heads, save_heads
from medusa_kit.train.forecast.dry_run import dry_run
from medusa_kit.train.trainer import train, train_heads


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_further_recurrent_heads_are_saved_beside_the_trained_ones(
    tiny_base, counting_rows, make_recipe, tmp_path
):
    base, found = tiny_base(), []
    for further in (0, 2):
        recipe = make_recipe(
            output_dir=str(tmp_path / str(further)),
            heads={"num_heads": 2, "further_heads": further, "kind": "recurrent", "mlp_size": 20},
            train={"epochs": 12, "learning_rate": 0.02},
        )
        found.append(load_heads(train_heads(base, counting_rows(), recipe).heads_folder, base))
    alone, more = found
    assert (alone.num_heads, more.num_heads) == (2, 4)
    gain_KD = alone.state_dict()["recurrent.gain"]
    assert torch.equal(more.state_dict()["recurrent.gain"], gain_KD[[0, 1, 1, 1]])
    with pytest.raises(ValidationError, match="further_heads goes with kind 'recurrent'"):
        make_recipe(heads={"num_heads": 2, "further_heads": 1, "kind": "hydra"})


@pytest.mark.parametrize("projection", ["shared", "own"])
def test_a_section_with_further_heads_goes_on_from_its_own_run(
    tiny_base, counting_rows, make_recipe, tmp_path, projection
):
    """The trained ones go on; the further ones are copies of the last again."""
    base = tiny_base()
    heads = {"num_heads": 2, "further_heads": 2, "kind": "recurrent", "mlp_size": 20,
             "projection": projection}  # fmt: skip

    def trained(name, **train):
        recipe = make_recipe(output_dir=str(tmp_path / name), heads=heads,
                             train={"epochs": 6, "learning_rate": 0.02, **train})  # fmt: skip
        return train_heads(base, counting_rows(), recipe)

    first = trained("first")
    later = trained("later", heads_from=str(first.heads_folder))
    assert later.scores.loss[0] < first.scores.loss[0] + 0.1
    tensors = load_heads(later.heads_folder, base).state_dict()
    gain_KD = tensors["recurrent.gain"]
    assert len(gain_KD) == 4
    assert torch.equal(gain_KD[2:], gain_KD[[1, 1]])
    last, copy = (tensors.get(f"projections.{k}.weight") for k in (1, 3))
    assert (last is None) == (projection == "shared")
    assert last is None or torch.equal(last, copy)


@pytest.mark.slow
def test_training_goes_on_from_the_heads_of_an_earlier_run(
    tiny_base, counting_rows, make_recipe, tmp_path, capsys
):
    """On the same or more text; recurrent heads may become more."""
    base, first_loss = tiny_base(), {}

    def trained(name, num_heads, **train):
        recipe = make_recipe(
            output_dir=str(tmp_path / name),
            heads={"num_heads": num_heads, "kind": "recurrent", "mlp_size": 20},
            train={"epochs": 12, "learning_rate": 0.02, "log_every": 1, **train},
        )
        report = train_heads(base, counting_rows(), recipe)
        lines = metrics(tmp_path / name)
        first_loss[name] = next(line["loss"] for line in lines if "loss" in line)
        return report

    first = trained("first", 2)
    later = trained("later", 3, epochs=1, heads_from=str(first.heads_folder))
    trained("untrained", 3, epochs=1)
    assert first_loss["later"] < 0.7 * first_loss["untrained"]
    assert later.scores.loss[0] < first.scores.loss[0] + 0.1
    assert load_heads(later.heads_folder, base).num_heads == 3
    with torch.no_grad():
        base.model.lm_head.weight += 0.01  # fine-tuned since
    base = wrap_model(base.model, None, "fine-tuned")
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        load_heads(later.heads_folder, base)
    moved = trained("moved", 3, epochs=1, heads_from=str(later.heads_folder))
    assert "those of another base" in capsys.readouterr().err
    assert load_heads(moved.heads_folder, base).config.base_fingerprint == base.info.fingerprint
    with pytest.raises(ConfigError, match=r"num_heads is 3; heads\.num_heads is 2"):
        trained("fewer", 2, heads_from=str(later.heads_folder))
    assert metrics(tmp_path / "later")[0]["step"] == 0  # judged before the first update
    kept = load_heads(moved.heads_folder, base).state_dict()
    spoilt = trained("spoilt", 3, epochs=1, learning_rate=3.0, heads_from=str(moved.heads_folder))
    found = load_heads(spoilt.heads_folder, base).state_dict()
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_earlier_heads_are_looked_for_before_the_base_is_loaded(tiny_base, make_recipe, tmp_path):
    recipe = make_recipe(
        base={"model": str(tmp_path / "no-base")}, train={"heads_from": str(tmp_path / "no-heads")}
    )
    for start in (train, dry_run):
        with pytest.raises(CheckpointError, match="no heads at"):
            start(recipe)
    (tmp_path / "no-heads").mkdir()
    with pytest.raises(CheckpointError, match="no heads at"):
        train(recipe)
    heads = MedusaHeads.for_base(tiny_base(), recipe.heads.num_heads)
    save_heads(heads, tmp_path / "no-heads/heads")
    with pytest.raises(CheckpointError, match="is the folder of a run") as caught:
        train(recipe)
    assert "no-heads/heads" in caught.value.hint
    shutil.move(tmp_path / "no-heads/heads/config.json", tmp_path / "no-heads")
    with pytest.raises(CheckpointError, match="is missing"):
        train(recipe)


def test_fewer_columns_than_asked_for_are_kept(tiny_base, counting_rows, make_recipe, tmp_path):
    """The earlier run's text had no more tokens than that."""
    base = tiny_base()
    heads = {"num_heads": 2, "projection": "reduced", "reduced_size": base.info.vocab_size}
    recipe = make_recipe(output_dir=str(tmp_path / "first"), heads=heads)
    first = train_heads(base, counting_rows(), recipe)
    columns = load_heads(first.heads_folder, base).config.reduced_size
    assert columns < base.info.vocab_size
    again = make_recipe(
        output_dir=str(tmp_path / "again"),
        heads=heads,
        train={"heads_from": str(first.heads_folder)},
    )
    later = train_heads(base, counting_rows(), again)
    assert load_heads(later.heads_folder, base).config.reduced_size == columns
