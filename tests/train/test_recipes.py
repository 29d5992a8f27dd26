"""Every recipe loads and says what it needs; the debug recipe runs with each stage."""

import re
from pathlib import Path

import pytest

from medusa_kit.heads.checkpoint import read_config
from medusa_kit.heads.formats.engines import formats_for
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.forecast.dry_run import dry_run
from medusa_kit.train.trainer import train

ROOT = Path(__file__).parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HEADER = ("needs:", "command:", "hardware:", "time:", "acceptance:")
HONEST = re.compile(r"measured|cited|base is random")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_load_and_say_what_they_need(path):
    recipe = load_recipe(path)
    assert recipe.output_dir.startswith("runs/")
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for name in HEADER:
        assert sum(line.startswith(f"# {name}") for line in comments) == 1, name
    header = " ".join(comments)
    assert f"recipes/{path.name}" in header
    for name in ("time:", "acceptance:"):
        said = header.split(name)[1].split("acceptance:" if name == "time:" else "##")[0]
        assert HONEST.search(said), f"{name} says neither measured nor cited: {said}"


def test_models_and_earlier_heads_are_looked_up_as_sources_are(tmp_path, monkeypatch):
    """Beside the recipe, then in the working folder, else left as they are."""
    for place in ("recipes/base", "here/base", "here/heads"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "recipes/r.yaml"

    def found(model, heads):
        path.write_text(
            f"output_dir: out\nbase: {{model: {model}}}\ndata: {{sources: [base]}}\n"
            f"train: {{heads_from: {heads}}}\n"
        )
        recipe = load_recipe(path)
        assert load_recipe(path).data.sources == [str(tmp_path / "recipes/base")]
        return recipe.base.model, recipe.train.heads_from

    beside, here = str(tmp_path / "recipes/base"), str(tmp_path / "here/heads")
    assert found("base", "heads") == (beside, here)
    assert found("org/name", "gone") == ("org/name", "gone")
    (tmp_path / "here/debug-tiny").mkdir()
    assert found("debug-tiny", "heads") == ("debug-tiny", here)


def test_second_stages_begin_with_the_heads_of_their_first():
    """The same heads and base, and heads_from is where the first stage leaves them."""
    for path in RECIPES:
        recipe = load_recipe(path)
        if recipe.train.heads_from is None:
            continue
        first = load_recipe(path.with_name(path.name.replace("stage2", "stage1")))
        assert recipe.train.heads_from == f"{first.output_dir}/heads"
        assert recipe.heads == first.heads
        assert recipe.base == first.base


LARGE = [path for path in RECIPES if re.match("llama|qwen|mistral", path.stem)]
FOR_VLLM = [path for path in LARGE if path.stem.endswith("_vllm")]


def test_every_recipe_for_a_large_model_has_one_for_vllm_beside_it():
    """The same base and text; vLLM loads the heads of the one, and the other's draft best."""
    assert {path.stem.removesuffix("_vllm") for path in FOR_VLLM} == {
        path.stem for path in LARGE if path not in FOR_VLLM
    }
    for path in FOR_VLLM:
        ours, theirs = (
            load_recipe(path.with_stem(path.stem.removesuffix("_vllm"))),
            load_recipe(path),
        )
        assert (ours.base, ours.data, ours.train) == (theirs.base, theirs.data, theirs.train)
        assert ours.output_dir != theirs.output_dir
        assert ours.heads.kind == "recurrent"
        assert formats_for(ours.heads) == []
        assert "vllm" in formats_for(theirs.heads)
        for recipe in (ours, theirs):
            assert recipe.heads.projection == "reduced"
            whole = recipe.stage == "medusa1"  # not possible with Medusa-2
            assert (recipe.train.soft_top == "all") == whole
            assert (recipe.data.train_on == "all") == whole
            assert recipe.train.optimizer == "adamw" or not recipe.deepspeed.enabled


@pytest.mark.parametrize("name", ["llama3.1_8b_instruct", "llama3.1_8b_multinode"])
@pytest.mark.parametrize("end", ["", "_vllm"])
def test_their_settings_train_together(tmp_path, name, end):
    """On the tiny base, in one process without DeepSpeed, in float32."""
    recipe = load_recipe(ROOT / f"recipes/{name}{end}.yaml", [
        "base.model=debug-tiny", "base.dtype=float32", "base.device=cpu", "heads.reduced_size=64",
        "train.feature_batch_tokens=512", "train.epochs=1", "data.eval_fraction=0.2",
        f"data.sources=[{ROOT / 'recipes/debug_conversations.jsonl'}]",
        f"output_dir={tmp_path}", "deepspeed.enabled=false", "deepspeed.zero_stage=0",
        *([] if "multinode" in name else [f"train.cache_dir={tmp_path / 'cache'}"]),
    ])  # fmt: skip
    report = train(recipe)
    assert report.num_updates == 1
    assert read_config(report.heads_folder).kind == recipe.heads.kind


@pytest.mark.parametrize("overrides", [
    ["stage=medusa1"],
    ["stage=medusa1", "train.features=live", "heads.kind=hydra", "train.loss=lk"],
    ["stage=medusa2"],
    ["stage=medusa2", "joint.moves=full", "heads.kind=hydra"],
    ["stage=medusa2", "heads.kind=recurrent", "train.optimizer=muon"],
], ids=" ".join)  # fmt: skip
def test_the_debug_recipe_makes_two_updates_with_each_stage(tmp_path, overrides):
    recipe = load_recipe(
        ROOT / "recipes/debug.yaml",
        [f"output_dir={tmp_path}", "base.device=cpu", "deepspeed.enabled=false", *overrides],
    )
    report = train(recipe)
    assert report.num_updates == 2
    assert (report.heads_folder / "heads.safetensors").is_file()
    assert (report.quality is None) == (recipe.stage == "medusa1")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stage", ["medusa1", "medusa2"])
def test_a_dry_run_shows_the_work_and_writes_nothing(tmp_path, stage, optimizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features = ["train.features=disk"] if stage == "medusa1" else []
    deepspeed = f"deepspeed.enabled={str(optimizer == 'adamw').lower()}"
    recipe = load_recipe(
        ROOT / "recipes/debug.yaml", [f"stage={stage}", "output_dir=run", "base.device=cpu",
                                      f"train.optimizer={optimizer}", deepspeed, *features]
    )  # fmt: skip
    said = dry_run(recipe)
    assert "8 training rows" in said
    assert "154 training tokens" in said
    trained = {"medusa1": 3 * 64 * 65, "medusa2": 3 * 64 * 65 + 65_536}[stage]
    assert f"{trained:,} trained parameters, of them {3 * 64 * 65:,} in the heads" in said
    assert re.search(r"memory, about: model \d", said)
    assert re.search(r"time on this machine, about: .* updates \d", said)
    assert "«" in said.splitlines()[-1] or "«" in said
    assert not list(tmp_path.iterdir())
