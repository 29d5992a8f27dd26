import pytest

from medusa_kit.config import differences, dump, load_recipe
from medusa_kit.errors import ConfigError

MINIMAL = """
output_dir: out
base: {model: debug-tiny}
data: {sources: [rows.jsonl]}
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def test_defaults_and_overrides(recipe_file):
    recipe = load_recipe(
        recipe_file, ["train.learning_rate=1e-4", "heads.num_heads=3", "data.sources=[a, b]"]
    )
    assert recipe.train.learning_rate == 1e-4
    assert recipe.heads.num_heads == 3
    assert recipe.data.sources == ["a", "b"]
    assert recipe.train.head_decay == 0.8


def test_override_opens_a_section_the_file_lacks(recipe_file):
    assert load_recipe(recipe_file, ["logging.project=mine"]).logging.project == "mine"


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("train.lerning_rate=1", "train.learning_rate"),
        ("trian.epochs=1", "train"),
        ("learning_rate=1", "train.learning_rate"),
        ("base.modle=x", "base.model"),
    ],
)
def test_unknown_key_names_the_nearest(recipe_file, override, suggestion):
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, [override])
    assert str(recipe_file) in caught.value.message
    assert override.split("=")[0].split(".")[0] in caught.value.message
    assert caught.value.hint == f"did you mean {suggestion}?"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.epochs=many", ["train.epochs", "'many'", "integer"]),
        ("train.epochs=0", ["train.epochs", "0", "greater than or equal to 1"]),
        ("heads.projection=wide", ["heads.projection", "'wide'", "'shared', 'own' or 'reduced'"]),
        ("heads.reduced_size=100", ["reduced_size", "'shared'"]),
        ("heads.projection=reduced", ["reduced_size None"]),
        ("heads.kind=eagle", ["heads.kind", "'eagle'", "'medusa', 'rooted' or 'hydra'"]),
        ("train.soft_share=0.5", ["soft_share 0.5", "'cross_entropy'"]),
        ("train.loss=soft", ["soft_share None"]),
        ("train.soft_top=8", ["soft_top 8", "loss 'soft'"]),
        ("train=3", ["train = 3"]),
        ("seed.deep=1", ["seed"]),
        ("nonsense", ["nonsense", "section.key=value"]),
        ("train.epochs=[1", ["train.epochs=[1", "YAML"]),
    ],
)
def test_bad_values_are_named(recipe_file, override, parts):
    recipe_file.write_text(MINIMAL + "seed: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, [override])
    for part in parts:
        assert part in caught.value.message


def test_missing_key_and_missing_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: out\ndata: {sources: [x]}\nbase: {}\n")
    with pytest.raises(ConfigError, match=r"'base\.model' is missing"):
        load_recipe(path)
    with pytest.raises(ConfigError, match="no recipe at"):
        load_recipe(tmp_path / "other.yaml")
    path.write_text("- a\n- list\n")
    with pytest.raises(ConfigError, match="expected sections"):
        load_recipe(path)


def test_dump_loads_back_equal(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["heads.projection=reduced", "heads.reduced_size=64"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(recipe))
    assert load_recipe(copy) == recipe


def test_sources_are_found_beside_the_recipe_first(recipe_file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for folder in (tmp_path, elsewhere):
        (folder / "rows.jsonl").write_text("")
    (elsewhere / "here.jsonl").write_text("")
    recipe = load_recipe(recipe_file, ["data.sources=[rows.jsonl, here.jsonl, a/dataset]"])
    assert recipe.data.sources == [
        str(tmp_path / "rows.jsonl"),
        str(elsewhere / "here.jsonl"),
        "a/dataset",
    ]


def test_differences_name_the_keys(recipe_file):
    ours, theirs = load_recipe(recipe_file), load_recipe(recipe_file, ["train.epochs=5"])
    assert differences(ours, theirs) == ["train.epochs: 1 ≠ 5"]
    assert differences(ours, ours) == []
