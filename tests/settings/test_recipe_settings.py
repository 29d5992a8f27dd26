import pytest

from medusa_kit.errors import ConfigError
from medusa_kit.settings.recipe import SourceSection, differences, dump, load_recipe

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
        ("joint.heads_from=x", "train.heads_from"),
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
        ("heads.kind=eagle", ["heads.kind", "'eagle'", "'medusa', 'hydra' or 'recurrent'"]),
        ("heads.mlp_size=8", ["mlp_size 8 with kind 'medusa'", "goes with kind 'recurrent'"]),
        ("heads.mlp_size=0", ["heads.mlp_size", "greater than or equal to 1"]),
        ("train={loss: cross_entropy, soft_share: 0.5}", ["soft_share 0.5", "'cross_entropy'"]),
        ("train={loss: lk, soft_top: all}", ["loss 'lk' with soft_top 'all'", "'soft'"]),
        ("train.soft_top=0", ["train.soft_top = 0: expected greater than or equal to 1 or 'all'"]),
        ("train.soft_top=some", ["train.soft_top = 'some': expected a valid integer", "or 'all'"]),
        ("train={loss: cross_entropy, soft_top: 8}", ["soft_top 8", "'soft' and 'lk'"]),
        ("train.optimizer=muon", ["optimizer 'muon' with deepspeed", "deepspeed.enabled=false"]),
        ("train.optimizer=sgd", ["train.optimizer", "'adamw' or 'muon'"]),
        ("train.average=1", ["train.average = 1", "less than 1"]),
        ("train.average=0", ["train.average = 0", "greater than 0"]),
        ("train.cache_dir=x", ["cache_dir 'x'", "features 'disk'"]),
        ("joint.moves=full", ["stage 'medusa1'", "section joint"]),
        ("joint={lora: {rnk: 3}}", ["'joint.lora.rnk'"]),
        ("joint={moves: full, teacher: live}", ["teacher 'live'", "the original is gone"]),
        ("joint={moves: full, save_merged: true}", ["no adapter to merge"]),
        ("deepspeed.zero_stage=4", ["deepspeed.zero_stage", "0, 1, 2 or 3"]),
        ("deepspeed.offload.optimizer=true", ["offload.optimizer", "zero_stage 0"]),
        ("deepspeed.offload.parameters=true", ["offload.parameters", "needs 3"]),
        ("data.sources=[{source: a, wieght: 2}]", ["sources.0", "'wieght'", "mean weight?"]),
        ("data.sources=[a, {source: a, zzz: 2}]", ["sources.1", "'zzz'", "source, weight, limit"]),
        ("data.sources=[{weight: 2}]", ["'data.sources.0.source' is missing"]),
        ("data.sources=[{source: a, weight: 0}]", ["data.sources.0.weight", "greater than 0"]),
        ("data.sources=[{source: a, weight: .inf}]", ["data.sources.0.weight", "finite"]),
        ("data.sources=[{source: a, limit: 0}]", ["data.sources.0.limit = 0", "equal to 1"]),
        ("data.sources=[3]", ["data.sources.0", "3 is no source", "{source, weight, limit}"]),
        ("data.mix=shuffle", ["data.mix", "'shuffle'", "'exhaust' or 'stop_at_first'"]),
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


def test_an_average_is_refused_where_no_process_has_the_whole_weights(recipe_file):
    recipe_file.write_text(MINIMAL)
    zero_3 = ["train.average=0.999", "deepspeed.zero_stage=3"]
    with pytest.raises(ConfigError, match=r"average 0\.999 with deepspeed\.zero_stage 3") as caught:
        load_recipe(recipe_file, zero_3)
    assert "use zero_stage 0, 1 or 2" in caught.value.message
    for allowed in (["deepspeed.enabled=false"], ["deepspeed.zero_stage=2"]):
        assert load_recipe(recipe_file, [*zero_3, *allowed]).train.average == 0.999


def test_medusa2_reads_live_and_in_a_range_that_trains(recipe_file):
    recipe_file.write_text(MINIMAL)
    for override, said in (
        ("train.features=disk", "always live"),
        ("base.dtype=float16", "use bfloat16"),
        ("data.train_on=all", "write prompts"),
        ("train.soft_top=all", "give a number"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_recipe(recipe_file, ["stage=medusa2", override])
    assert load_recipe(recipe_file, ["stage=medusa2"]).joint_options.moves == "lora"


def test_a_key_of_an_optional_section_is_suggested(recipe_file):
    recipe_file.write_text(MINIMAL)
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, ["stage=medusa2", "joint.heads_wieght=1"])
    assert "joint.heads_weight" in caught.value.hint


def test_records_say_where_a_run_writes_without_steps_back(recipe_file, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe_file.write_text(MINIMAL)
    recipe = load_recipe(
        recipe_file, ["output_dir=../there", "train.features=disk", "train.cache_dir=a/../b"]
    )
    assert recipe.output_dir == str(tmp_path / "there")
    assert recipe.train.cache_dir == str(tmp_path / "here/b")
    assert load_recipe(recipe_file, ["output_dir=runs/x"]).output_dir == "runs/x"


def test_missing_key_and_missing_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: out\ndata: {sources: [x]}\nbase: {}\n")
    with pytest.raises(ConfigError, match=r"'base\.model' is missing"):
        load_recipe(path)
    with pytest.raises(ConfigError, match="no recipe at"):
        load_recipe(tmp_path / "other.yaml")
    path.write_text("base: {model: [\ndata: }\n")
    with pytest.raises(ConfigError, match="is no YAML") as error:
        load_recipe(path)
    assert "\n" not in error.value.message
    path.write_text("- a\n- list\n")
    with pytest.raises(ConfigError, match="expected sections"):
        load_recipe(path)


def test_dump_loads_back_equal(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["heads.projection=reduced", "heads.reduced_size=64"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(recipe))
    assert load_recipe(copy) == recipe


MIXED = "data.sources=[rows.jsonl, {source: more.jsonl, weight: 2.5, limit: 40}, {source: third}]"


def test_sources_with_weights(recipe_file, tmp_path):
    (tmp_path / "more.jsonl").write_text("")
    recipe = load_recipe(recipe_file, [MIXED, "data.mix=stop_at_first"])
    more = SourceSection(source=str(tmp_path / "more.jsonl"), weight=2.5, limit=40)
    assert recipe.data.sources == ["rows.jsonl", more, SourceSection(source="third")]
    assert recipe.data.entries() == [
        SourceSection(source="rows.jsonl", weight=1, limit=None), more,
        SourceSection(source="third", weight=1, limit=None),
    ]  # fmt: skip
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(recipe))
    assert load_recipe(copy) == recipe
    assert differences(recipe, load_recipe(copy)) == []
    assert "- rows.jsonl\n" in dump(recipe), "a name stays a name"


ONE = "data.sources=[{source: a}]"


def test_streaming_needs_a_limit_for_every_data_set(recipe_file, tmp_path):
    (tmp_path / "rows").write_text("a file of any name")
    limited = "data.sources=[rows, gone.jsonl, {source: owner/name, limit: 9}]"
    for overrides in ([limited], [ONE, "data.limit=5"]):
        assert load_recipe(recipe_file, [*overrides, "data.streaming=true"]).data.streaming
    for sources, name in ((ONE, "a"), ("data.sources=[rows, owner/name]", "owner/name")):
        with pytest.raises(
            ConfigError, match=f"streaming reads '{name}' without a limit"
        ) as caught:
            load_recipe(recipe_file, [sources, "data.streaming=true"])
        assert "data.limit" in caught.value.hint
        assert not load_recipe(recipe_file, [sources]).data.streaming


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
