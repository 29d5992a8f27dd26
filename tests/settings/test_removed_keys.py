"""Keys and values of earlier versions: read where they change nothing, refused with what to do."""

from typing import ClassVar

import pytest
import yaml
from pydantic import ValidationError

from medusa_kit.errors import ConfigError
from medusa_kit.settings.drafter_names import REMOVED
from medusa_kit.settings.drafters import drafter_options
from medusa_kit.settings.engine import check_value
from medusa_kit.settings.recipe import HeadsSection, load_recipe
from medusa_kit.settings.schema import Removed, Section, explain


class Inner(Section):
    removed: ClassVar = {
        "gone": Removed("it lost", "leave it out", kept=(0,)),
        "word": Removed("that one lost", "use 'new'", values=("old",)),
    }
    word: str = "new"


class Outer(Section):
    inner: Inner = Inner()


def test_a_value_that_means_what_happens_anyway_is_read():
    assert Outer.model_validate({"inner": {"gone": 0, "word": "new"}}) == Outer()


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        ("gone", 1, "gone = 1 is no longer there: it lost", "leave it out"),
        ("gone", [], "gone = [] is no longer there: it lost", "leave it out"),
        ("word", "old", "word = 'old' is no longer there: that one lost", "use 'new'"),
    ],
)
def test_what_is_gone_is_refused_with_what_to_do(key, value, message, hint):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": {key: value}})
    error = explain(caught.value, "recipe", Outer)
    assert (error.message, error.hint) == (f"recipe: inner: {message}", hint)


RECIPE = "output_dir: out\nbase: {model: debug-tiny}\ndata: {sources: [rows.jsonl]}\n"


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("heads.prefix_layers=1", "leave it out"),
        ("train.fused_loss=liger", "leave it out"),
        ("train.fused_loss=cut_cross_entropy", "leave it out"),
        ("train.head_weights=learned", "leave it out"),
        ("train.loss=tv", "use 'soft'"),
    ],
)
def test_a_recipe_is_told_what_became_of_its_key(tmp_path, override, advice):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    name, _, value = override.partition("=")
    key = name.rpartition(".")[2]
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, [override])
    assert f"{key} = {yaml.safe_load(value)!r} is no longer there" in caught.value.message
    assert caught.value.hint.startswith(advice)


@pytest.mark.parametrize("fused_loss", ["auto", "never"])
def test_a_recipe_kept_by_an_earlier_version_is_read(tmp_path, fused_loss):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    earlier = [
        "heads.prefix_layers=0", f"train.fused_loss={fused_loss}", "train.head_weights=decay"
    ]  # fmt: skip
    assert load_recipe(path, earlier) == load_recipe(path)


def test_head_kinds_and_draws_that_lost_are_refused():
    with pytest.raises(ValidationError, match="kind = 'rooted' is no longer there: 'hydra'"):
        HeadsSection(kind="rooted")
    kept = {"sampling": "matched", "lengths": "threshold", "width": 1, "adapt": True}
    matched = drafter_options("draft-model", {**kept, "max_length": 5, "tokenizer": "text"})
    assert matched == drafter_options("draft-model", {"max_length": 5, "tokenizer": "text"})
    with pytest.raises(ConfigError, match="sampling = 'rejection' is no longer there") as caught:
        drafter_options("draft-model", {"sampling": "rejection"})
    assert "leave it out" in str(caught.value.hint)
    for name, value in (("lengths", "fixed"), ("lengths", "heuristic"), ("length", 4),
                        ("width", 2), ("adapt", False), ("tokenizer", "intersection")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name} = {value!r} is no longer there") as caught:
            drafter_options("draft-model", {name: value})
        assert caught.value.hint


def test_a_drafter_that_is_gone_is_told_apart_from_a_typing_error():
    for given in (
        lambda: drafter_options("combined"),
        lambda: auto(sources=["combined"]),
        lambda: check_value("fallback", "combined"),
    ):
        with pytest.raises(ConfigError, match="'combined'") as caught:
            given()
        assert caught.value.hint == REMOVED["combined"]
    with pytest.raises(ConfigError, match="'sufix'") as caught:
        drafter_options("sufix")
    assert "suffix" in caught.value.hint


def test_options_of_a_source_that_does_not_exist_are_refused():
    with pytest.raises(ConfigError, match="'sufix'") as caught:
        auto(options={"sufix": {"num_nodes": 4}})
    assert "suffix" in caught.value.hint


def test_options_of_a_source_that_is_not_asked_are_refused():
    with pytest.raises(ConfigError, match="options of recycling, which is none of the sources"):
        auto(sources=["suffix"], options={"recycling": {"num_nodes": 4}})
    assert auto(sources=["suffix"], options={"suffix": {"num_nodes": 4}}).options["suffix"]
    assert auto(options={"suffix": {"num_nodes": 4}}).sources is None


def auto(**options):
    return drafter_options("auto", options)
