"""The table of docs/training.md and the headers of recipes say what the estimate gives now."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.forecast import from_config
from medusa_kit.train.forecast.dry_run import dry_run

ROOT = Path(__file__).parents[3]
# Parameters in billions, as their publishers say.
PUBLISHED = {"Llama-3.2-1B": 1.24, "Llama-3.1-8B": 8.03, "Llama-3.1-70B": 70.6, "Qwen2.5-7B": 7.62,
             "Qwen3-8B": 8.19, "Mistral-7B": 7.25}  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("training_needs")


def test_the_page_has_the_table(script: Any) -> None:
    page = (ROOT / "docs/training.md").read_text()
    assert script.table() in page, "python benchmarks/training_needs.py prints it"
    products, memory = script.FLOP_A_SECOND / 1e12, script.BYTES_A_SECOND / 1e12
    for said in (
        f"{script.POSITIONS:,} training tokens",
        f"{script.REQUESTS} requests",
        f"{script.PRODUCTS_REACHED:.0%} of {products:.0f} TFLOP/s",
        f"{script.MEMORY_REACHED:.0%} of {memory} TB/s",
    ):
        assert said in page, said


@pytest.mark.slow
def test_recipes_say_what_they_take(script: Any) -> None:
    recipe = load_recipe(ROOT / "recipes/llama3.1_8b_instruct.yaml")
    for shape, billions in PUBLISHED.items():
        found = script.described_on(shape, recipe)
        assert found.numbers / 1e9 == pytest.approx(billions, rel=0.005)
    for name in script.RECIPES:
        for end in script.KINDS:
            header = (ROOT / f"recipes/{name}{end}.yaml").read_text()
            assert script.header(name + end) in header


@pytest.mark.parametrize("end", ["", "_vllm"])
def test_a_dry_run_of_a_large_recipe_needs_the_config_alone(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(from_config, "products_a_second", lambda *_: 1e12)
    (tmp_path / "config.json").write_text(script.json.dumps(script.SHAPES["Llama-3.1-8B"]))
    said = dry_run(load_recipe(ROOT / f"recipes/llama3.1_8b_instruct{end}.yaml", [
        f"base.model={tmp_path}", "base.device=cpu",
    ]))  # fmt: skip
    assert "8,030,261,248 parameters by its config" in said
    assert "no text yet" in said


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_products_of_an_update_are_those_of_its_heads(script: Any, kind: str) -> None:
    """Counted by hand: 8B, AdamW; a recurrent network runs once for each head."""
    end = next(end for end, one in script.KINDS.items() if one == kind)
    recipe = load_recipe(
        ROOT / f"recipes/llama3.1_8b_instruct{end}.yaml", ["train.optimizer=adamw"]
    )
    D, mlp, columns, heads = 4096, 14336, 8192, 4
    found = script.described_on("Llama-3.1-8B", recipe)
    own = {"recurrent": 2 * D * D + 3 * D * mlp + D + heads * D, "medusa": heads * (D * D + D)}
    passes = heads if kind == "recurrent" else 1
    assert found.in_heads == own[kind]
    products = 3 * (passes * own[kind] + heads * columns * D)
    rate = script.products_a_second(torch.bfloat16)
    assert found.forecast.speed.position == pytest.approx(products / rate, rel=1e-6)
    by_muon = script.described_on("Llama-3.1-8B", load_recipe(
        ROOT / f"recipes/llama3.1_8b_instruct{end}.yaml"
    ))  # fmt: skip
    assert by_muon.forecast.speed.position > found.forecast.speed.position
    weights = (by_muon.forecast.weights.moments, found.forecast.weights.moments)
    assert weights[0] < 0.51 * weights[1]
