"""A path of some machine is never taken for a name on the Hub."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny_models import tiny_base

from medusa_kit.base.files import lasting_name, whole_name
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.heads import MedusaHeads, save_heads
from medusa_kit.heads.checkpoint import read_config, write_config
from medusa_kit.hub.card import CardOptions, render_card
from medusa_kit.hub.measured import read_measured
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.settings.engine import DEBUG_NAME
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.trainer import train


@pytest.fixture
def out_model(monkeypatch, tmp_path):
    """The working folder holds a model whose relative path has the form of a Hub id."""
    monkeypatch.chdir(tmp_path)
    load_base_model(DEBUG_NAME, device="cpu").model.save_pretrained("out/model")
    return "out/model"


@pytest.mark.parametrize("load", [load_base_model, base_for_decoding])
def test_a_base_keeps_its_whole_path(out_model, monkeypatch, tmp_path, load):
    """Also from another working folder."""
    base = load(out_model, device="cpu")
    assert base.info.name == str(tmp_path / out_model)
    assert MedusaHeads.for_base(base, 1).config.base_model_name == str(tmp_path / out_model)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert base.model.config.hidden_size == base.info.hidden_size


def test_names_of_models_in_memory_and_on_the_hub(out_model, tmp_path):
    loaded = wrap_model(load_base_model(out_model, device="cpu").model, None, name=out_model)
    assert lasting_name(loaded.info.name, loaded.info.source) == str(tmp_path / out_model)
    assert whole_name("owner/model", "hub") == "owner/model"
    assert lasting_name("owner/model", "memory") == "owner/model"


@pytest.mark.parametrize("where", ["provenance", "run"])
def test_heads_of_medusa_2_name_no_model_on_the_hub(tmp_path, where):
    """Earlier versions wrote the relative path of the run's own folder."""
    folder = tmp_path / "copied/heads"
    save_heads(MedusaHeads.for_base(tiny_base("llama"), 2), folder)
    write_config(folder, replace(read_config(folder), base_model_name="out/adapter"))
    options = CardOptions("owner/heads")
    assert options.base_of(read_measured(folder)) == "out/adapter"  # nothing tells
    recipe = {"stage": "medusa2", "output_dir": "out", "base": {"model": "owner/model"}}
    recipe |= {"data": {"sources": ["d"]}}
    recipe |= {"train": {"epochs": 1, "loss": "soft", "learning_rate": 1e-3}}
    path = {"provenance": folder / "provenance.json", "run": folder.parent / "run.json"}
    path[where].write_text(json.dumps({"recipe": recipe, "versions": {}}))
    measured = read_measured(folder)
    assert options.base_of(measured) is None
    card = render_card(measured, options)
    assert "huggingface.co/out" not in card
    assert "base_model:" not in card
    named = replace(options, base_model="owner/merged")
    assert "base_model: owner/merged" in render_card(measured, named)


def test_the_merged_model_of_medusa_2_is_named_in_its_heads(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i}?", "completion": f"{i * 7} {i * 13}"}) + "\n" for i in range(4)
    ))  # fmt: skip
    train(TrainRecipe.model_validate({
        "stage": "medusa2", "output_dir": "out", "base": {"model": "debug-tiny"},
        "joint": {"save_merged": True, "lora": {"rank": 2}}, "heads": {"num_heads": 1},
        "data": {"sources": ["d.jsonl"], "eval_fraction": 0.3}, "deepspeed": {"enabled": False},
    }))  # fmt: skip
    for name in ("adapter", "merged"):
        config = read_config(Path("out") / name / "medusa_heads")
        assert config.base_model_name == str(tmp_path / "out" / name)
