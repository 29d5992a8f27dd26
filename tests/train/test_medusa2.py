"""Medusa-2: base and heads together, what it saves, and what it reports about the changed base."""

import json

import pytest
import torch

from medusa_kit.base import adapters
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.data.chat import EncodedExample
from medusa_kit.engine.load import load
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError
from medusa_kit.heads import MedusaHeads, load_heads, save_heads
from medusa_kit.settings.recipe import LoraSection
from medusa_kit.train.preparation import new_heads
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads

TEXTS = ["count: one two three four five six", "a b c d e f g h", "to be or not to be, to be"]


@pytest.fixture
def debug_rows():
    """Rows of the debug model: a few texts, each many times over between two letters of its own,
    since rows with the same answer would all be held out or none."""

    def build(base, count=20):
        rows = []
        for row in range(count):
            own = chr(65 + row)
            ids = base.tokenizer(own + (TEXTS[row % 3] * 2)[: 28 + row % 3] + own).input_ids
            rows.append(EncodedExample(ids, [i >= 4 for i in range(len(ids))], row + 1))
        return rows

    return build


@pytest.fixture
def run(make_recipe, debug_rows, tmp_path):
    """Medusa-2 on the debug model: (base before training, report, recipe)."""

    def build(name="run", rows=None, train=None, **joint):
        recipe = make_recipe(
            stage="medusa2",
            output_dir=str(tmp_path / name),
            base={"model": "debug-tiny"},
            heads={"num_heads": 2, "kind": joint.pop("kind", "medusa")},
            train={"epochs": 2, "learning_rate": 2e-3, "micro_batch_positions": 100,
                   "feature_batch_tokens": 200, "packing": joint.pop("packing", False),
                   "keep": "last", **(train or {})},
            joint=joint,
        )  # fmt: skip
        base = load_base_model("debug-tiny")
        return base, train_heads(base, rows or debug_rows(base), recipe), recipe

    return build


def losses(recipe):
    lines = (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def logits(base, text="to be or not"):
    ids = torch.tensor([base.tokenizer(text).input_ids])
    with torch.no_grad():
        return base.model(ids).logits[0]


@pytest.mark.usefixtures("often")
def test_an_adapter_loads_in_one_step_and_is_the_model_that_was_trained(run):
    trained, report, recipe = run(moves="lora", distill_share=0.5, save_merged=True)
    original = load_base_model("debug-tiny")
    trained.model.eval()
    expected = logits(trained)
    assert (expected - logits(original)).abs().max() > 1e-3
    for place in ("adapter", "merged"):
        base = load_base_model(f"{recipe.output_dir}/{place}")
        torch.testing.assert_close(logits(base), expected, rtol=1e-4, atol=1e-4)
        heads = load_heads(f"{recipe.output_dir}/{place}/medusa_heads", base)
        assert heads.num_heads == 2
        # paired heads are found without being named, and decoding is the new model's own
        engine = load(f"{recipe.output_dir}/{place}")
        assert engine.heads_source.endswith("medusa_heads")
    assert report.heads_folder.parent.name == "adapter"
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        load_heads(report.heads_folder, original)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_whole_model_loads_in_one_step(run, kind):
    trained, report, recipe = run(moves="full", kind=kind)
    base = load_base_model(f"{recipe.output_dir}/model")
    trained.model.eval()
    torch.testing.assert_close(logits(base), logits(trained), rtol=1e-4, atol=1e-4)
    assert load_heads(report.heads_folder, base).config.kind == kind
    assert report.heads_folder.parent.name == "model"
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        load_heads(report.heads_folder, load_base_model("debug-tiny"))


def test_the_teacher_is_the_same_live_and_cached(run):
    """Adapters switched off, or what the original said at the start: the same losses."""
    found = {}
    for teacher in ("live", "cached"):
        _, _, recipe = run(teacher, moves="lora", teacher=teacher, train={"log_every": 1})
        found[teacher] = losses(recipe)
    assert found["live"] == pytest.approx(found["cached"], rel=1e-5)
    assert len(found["live"]) > 5


def test_distillation_holds_the_base_to_its_original(run):
    """Hard targets change the base far more than the original's distribution does."""
    options = {"moves": "full", "heads_weight": 1e-3, "distill_top": 259}
    held = run("kl", distill_share=1.0, **options)[1].quality
    moved = run("hard", distill_share=0.0, **options)[1].quality
    assert held.perplexity_before == pytest.approx(moved.perplexity_before)
    assert abs(held.perplexity_after / held.perplexity_before - 1) < 0.05
    assert moved.perplexity_after < 0.8 * moved.perplexity_before
    assert held.same_token > moved.same_token + 0.1
    assert 0 <= moved.same_answer <= held.same_answer <= 1


def test_the_base_learns_to_be_foreseen(run, make_recipe, debug_rows, tmp_path):
    """Two-stage: heads that were trained alone improve further when the base is trained too."""
    base = load_base_model("debug-tiny")
    alone = make_recipe(
        output_dir=str(tmp_path / "alone"), base={"model": "debug-tiny"},
        heads={"num_heads": 2}, train={"epochs": 8, "micro_batch_positions": 100},
    )  # fmt: skip
    first = train_heads(base, debug_rows(base), alone)
    _, second, _ = run(
        moves="full", heads_weight=1.0,
        train={"epochs": 8, "learning_rate": 5e-3, "heads_from": str(first.heads_folder)},
    )  # fmt: skip
    assert second.scores.loss[1] < first.scores.loss[1] - 0.1


@pytest.mark.parametrize("packing", [False, True])
def test_gradient_checkpointing_and_packing_change_no_loss(run, packing):
    found = []
    for name, checkpointing, packed in (("plain", False, False), ("other", True, packing)):
        _, _, recipe = run(
            name, moves="lora", gradient_checkpointing=checkpointing, packing=packed,
            train={"log_every": 1},
        )  # fmt: skip
        found.append(losses(recipe))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_warmed_up_heads_of_another_shape_are_refused(run, make_recipe, debug_rows, tmp_path):
    base = load_base_model("debug-tiny")
    alone = make_recipe(output_dir=str(tmp_path / "alone"), heads={"num_heads": 3})
    folder = train_heads(base, debug_rows(base), alone).heads_folder
    with pytest.raises(ConfigError, match=r"num_heads is 3; heads\.num_heads is 2"):
        run(train={"heads_from": str(folder)})


def test_warmed_up_recurrent_heads(make_recipe, tmp_path):
    """Their MLP's size is that of the earlier run, unless another one is asked for."""
    base, folder = load_base_model("debug-tiny"), tmp_path / "heads"
    save_heads(MedusaHeads.for_base(base, 2, kind="recurrent", mlp_size=24), folder)
    for asked in ({}, {"mlp_size": 24}, {"mlp_size": 40}, {"kind": "hydra"}):
        recipe = make_recipe(
            stage="medusa2", base={"model": "debug-tiny"}, train={"heads_from": str(folder)},
            heads={"num_heads": 2, "kind": "recurrent", **asked},
        )  # fmt: skip
        if asked.get("mlp_size", 24) == 24 and "kind" not in asked:
            assert new_heads(base, [], recipe).config.mlp_size == 24
            continue
        name, value = next(iter(asked.items()))
        with pytest.raises(ConfigError, match=rf"heads\.{name} is {value}"):
            new_heads(base, [], recipe)


def test_lora_targets_that_match_nothing_name_the_nearest(tiny_base):
    model = tiny_base().model
    with pytest.raises(ConfigError, match="'q_prj' matches no") as caught:
        adapters.put_on(model, LoraSection(targets=["v_proj", "q_prj"]))
    assert "did you mean q_proj?" in caught.value.hint
    with pytest.raises(ConfigError, match="output embedding"):
        adapters.put_on(model, LoraSection(targets=["lm_head"]))
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_adapters_are_switched_off_and_on_again(tiny_base):
    model = tiny_base().model
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    adapters.put_on(model, LoraSection(rank=2))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    with adapters.switched_off(model):
        torch.testing.assert_close(model(ids).logits, before)
    assert (model(ids).logits - before).abs().max() > 0.1
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained


def test_four_bit_bases_are_refused_where_they_cannot_be_loaded(make_recipe, monkeypatch):
    with pytest.raises(ConfigError, match="4 bits") as caught:
        adapters.require_4bit("cpu")
    assert "joint.moves=lora" in caught.value.hint


def test_an_adapter_of_another_base_or_half_of_one_is_refused(run):
    _, _, recipe = run(moves="lora")
    folder = RunFolder(recipe).path / "adapter"
    info = json.loads((folder / "medusa_kit.json").read_text())
    (folder / "medusa_kit.json").write_text(json.dumps({**info, "base_fingerprint": "0" * 32}))
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        load_base_model(str(folder))
    (folder / "medusa_kit.json").write_text(json.dumps(info))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot be merged into"):
        load_base_model(str(folder))
    (folder / "medusa_kit.json").unlink()
    with pytest.raises(CheckpointError, match=r"medusa_kit\.json"):
        load_base_model(str(folder))


def test_a_family_without_checkpointing_says_so(run, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="does not support it"):
        run(gradient_checkpointing=True)


def test_a_wrapped_model_has_the_fingerprint_of_its_variant(tiny_base):
    base = tiny_base()
    base.model.config.medusa_kit_variant = "one"
    one = wrap_model(base.model)
    base.model.config.medusa_kit_variant = "two"
    assert len({base.info.fingerprint, one.info.fingerprint,
                wrap_model(base.model).info.fingerprint}) == 3  # fmt: skip
    assert one.info.fingerprint == base.fingerprint("one")
