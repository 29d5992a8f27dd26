"""Recipes, engine files and overrides are YAML 1.2: no text becomes another value."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from medusa_kit.errors import ConfigError
from medusa_kit.settings.core_yaml import load, number_of
from medusa_kit.settings.drafters import drafter_options
from medusa_kit.settings.engine_file import read_engine_file
from medusa_kit.settings.recipe import dump, load_recipe
from medusa_kit.settings.schema import apply_override

MINIMAL = "output_dir: out\nbase: {model: debug-tiny}\ndata: {sources: [rows.jsonl]}\n"
# Other values in version 1.1, or written in another way than they would be shown.
TEXTS = ("yes", "no", "on", "off", "Yes", "y", "N", "nO", "1:30", "190:20:30.15", "010", "0777",
         "1_000", "0b11", "0x1F", "0o17", "+1", "1.10", "1e5", "12e4567", "1.", ".5", ".inf",
         "-.Inf", ".NaN", "inf", "nan", "2024-01-01", "=", "123456789012345678901")  # fmt: skip
VALUES = {"5": 5, "-3": -3, "0": 0, "0.8": 0.8, "-2.5": -2.5, "100000": 100_000, "true": True,
          "TRUE": True, "False": False, "null": None, "~": None, "": None}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_text_stays_text(recipe: Path, text: str) -> None:
    assert load(f"a: {text}") == {"a": text}
    assert load_recipe(recipe, [f"base.revision={text}"]).base.revision == text
    recipe.write_text(MINIMAL + f"logging: {{project: {text}}}\n")
    again = recipe.with_name("again.yaml")
    again.write_text(dump(load_recipe(recipe)))
    assert load_recipe(again).logging.project == text
    engine = recipe.with_name("engine.yaml")
    engine.write_text(f"model: debug-tiny\nrevision: {text}\n")
    assert read_engine_file(engine).given["revision"] == text
    raw: dict[str, Any] = {}
    apply_override(raw, f"store={text}")
    assert raw == {"store": text}


@pytest.mark.parametrize("text", VALUES)
def test_values_of_the_core_schema(text: str) -> None:
    (value,) = load(f"a: {text}").values()
    assert (value, type(value)) == (VALUES[text], type(VALUES[text]))
    assert load(f'a: "{text}"') == {"a": text}


NUMBERS = {"010": 10, "+5": 5, "0x10": 16, "0o17": 15, "1e3": 1000, "5.0": 5, "1_000": 1000}


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_is_read_where_one_is_expected(recipe: Path, text: str) -> None:
    assert load_recipe(recipe, [f"train.epochs={text}"]).train.epochs == NUMBERS[text]
    assert load_recipe(recipe, [f"train.soft_top={text}"]).train.soft_top == NUMBERS[text]
    assert load_recipe(recipe, [f"data.limit={text}"]).data.limit == NUMBERS[text]
    assert drafter_options("suffix", {"num_nodes": text}).num_nodes == NUMBERS[text]


@pytest.mark.parametrize("text", ["1:30", "yes", "on", "true", "false", "1e999", "9" * 5000, ".5"])
def test_what_is_no_whole_number_is_refused_by_its_value(recipe: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [f"train.epochs={text}"])
    shown = text if text in ("true", "false") else f"'{text}'"
    assert f"train.epochs = {shown}"[:100] in caught.value.message or "0.5" in str(caught.value)
    assert len(caught.value.message) < 600
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "inf", "nan", "Infinity", "1e999"])
@pytest.mark.parametrize("name", ["train.learning_rate", "train.grad_clip", "train.weight_decay"])
def test_numbers_are_finite(recipe: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = .*expected a (finite|valid) number"):
        load_recipe(recipe, [f"{name}={text}"])


def test_switches_are_none_of_the_numbers(recipe: Path) -> None:
    for name in ("seed", "train.learning_rate", "train.average", "data.limit"):
        with pytest.raises(ConfigError, match="= true: expected a number"):
            load_recipe(recipe, [f"{name}=true"])
    for word in ("yes", "on", "true", "True"):  # what earlier recipes may have
        assert load_recipe(recipe, [f"data.streaming={word}", "data.limit=5"]).data.streaming


@pytest.mark.parametrize("written", ["1", "0", "1.0", '"true"', "'False'", "t", "null", "[true]"])
def test_nothing_else_is_a_switch(recipe: Path, written: str) -> None:
    """pydantic would take some of them for one."""
    for name in ("data.streaming", "logging.wandb"):
        with pytest.raises(ConfigError, match=rf"{name} = .*: expected true or false"):
            load_recipe(recipe, [f"{name}={written}"])


def test_text_that_is_read_as_something_else_is_told_to_be_quoted(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"revision = 1234567: expected a valid string") as caught:
        load_recipe(recipe, ["base.revision=1234567"])
    assert "quotes" in (caught.value.hint or "")
    assert load_recipe(recipe, ["base.revision='1234567'"]).base.revision == "1234567"


def test_a_seed_that_torch_cannot_take(recipe: Path) -> None:
    assert load_recipe(recipe, [f"seed={2**63 - 1}"]).seed == 2**63 - 1
    with pytest.raises(ConfigError, match="seed = "):
        load_recipe(recipe, [f"seed={2**63}"])


def test_tags_hold_the_same_forms() -> None:
    assert load("a: !!int 010") == {"a": 10}
    for wrong in ("!!int 1:30", "!!bool yes", "!!float 1:30", "!!int " + "9" * 5000):
        with pytest.raises(yaml.YAMLError, match="is not"):
            load(f"a: {wrong}")


def test_merged_mappings_are_read_as_before() -> None:
    assert load("x: &x {a: 1}\ny: {<<: *x, b: 2}")["y"] == {"a": 1, "b": 2}


def test_words_of_options_that_are_on_and_off(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model: debug-tiny\nprefix_cache: off\nheads: none\n")
    assert read_engine_file(path).given["prefix_cache"] == "off"


def test_other_values_are_no_numbers() -> None:
    for value in ("x", "", " 5", "٣", "1e999", None, 2.5, [1]):
        assert number_of(value) == value
