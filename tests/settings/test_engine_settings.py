"""Engine files: what they say, where their paths lead, and what is refused."""

from pathlib import Path

import pytest

from medusa_kit.errors import ConfigError
from medusa_kit.settings.engine_file import read_engine_file

EXAMPLES = sorted((Path(__file__).parents[2] / "recipes/engines").glob("*.yaml"))


@pytest.fixture
def engine_file(tmp_path: Path) -> Path:
    return tmp_path / "engine.yaml"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_loads(path: Path) -> None:
    assert read_engine_file(path).given["model"]
    assert f"recipes/engines/{path.name}" in path.read_text()


def test_arguments_are_those_that_the_file_gives(engine_file: Path) -> None:
    engine_file.write_text("model: debug-tiny\nheads: none\ndtype: bfloat16\ndrafter: none\n")
    assert read_engine_file(engine_file).arguments() == {
        "model": "debug-tiny", "heads": None, "dtype": "bfloat16", "drafter": "none",
        "drafter_options": {}}  # fmt: skip
    engine_file.write_text("model: m\nweights: int8\n")
    assert read_engine_file(engine_file).arguments() == {"model": "m", "weights": "int8"}
    engine_file.write_text("model: debug-tiny\n")
    assert read_engine_file(engine_file).arguments() == {"model": "debug-tiny"}


def test_relative_paths_are_looked_up_beside_the_file(engine_file: Path) -> None:
    folder = engine_file.parent
    for name in ("base", "heads/mine", "small"):
        (folder / name).mkdir(parents=True)
    engine_file.write_text("""
model: base
heads: heads/mine
tree: not_yet/tree.json
draft_model: small
drafter:
  name: auto
  options: {sources: [suffix], options: {suffix: {store: past.json, num_nodes: 4}}}
""")
    told = read_engine_file(engine_file).arguments()
    for key, place in {"model": "base", "heads": "heads/mine", "draft_model": "small",
                       "tree": "not_yet/tree.json"}.items():  # fmt: skip
        assert told[key] == str(folder / place)
    assert told["drafter_options"]["options"]["suffix"] == {
        "store": str(folder / "past.json"), "num_nodes": 4}  # fmt: skip


def test_names_are_no_paths(engine_file: Path) -> None:
    """The Hub's, the kit's own, even beside a folder of that name; a leading dot is a path."""
    (engine_file.parent / "debug-tiny").mkdir()
    (engine_file.parent / "auto").mkdir()
    engine_file.write_text("model: debug-tiny\nheads: auto\ndraft_model: org/small\n")
    told = read_engine_file(engine_file).arguments()
    assert (told["model"], told["heads"], told["draft_model"]) == (
        "debug-tiny",
        "auto",
        "org/small",
    )
    engine_file.write_text("model: ./gone\n")
    assert read_engine_file(engine_file).arguments()["model"] == str(engine_file.parent / "gone")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nhead: x", "unknown key 'head'\nhint: did you mean heads?"),
        ("heads: x", "'model' is missing"),
        ("model: m\ncompiled: perhaps", "compiled = 'perhaps': "),
        ("model: m\ncompiled: 1", "compiled = 1: expected true or false"),
        ('model: m\nforce: "true"', "force = 'true': expected true or false"),
        ("model: m\nserve: {port: true}", "serve.port = true: expected a number"),
        ("model: m\nweights: int4", "weights 'int4' is unknown; expected .*\n.*int8\\?"),
        ("model: m\nattention: flsh", "attention 'flsh' is unknown; expected .*\nhint: .* flash"),
        ("model: m\ncompiled: true\nfixed_shapes: never", "compile has no meaning"),
        ("model: m\nfallback: medusa", "fallback 'medusa' is unknown; expected one of draft-model"),
        ("model: m\ndrafter: sufix", "'sufix' is unknown.*\nhint: did you mean suffix"),
        ("model: m\ndrafter: {name: suffix, option: {}}", "did you mean drafter.options"),
        ("model: m\ndrafter: {name: suffix, options: {nodes: 3}}",
         "drafter suffix: there is no option 'nodes'\nhint: did you mean num_nodes"),
        ("model: m\ndrafter: {name: suffix, options: {num_nodes: 1}}", "num_nodes = 1: expected"),
        ("model: m\ndrafter: draft-model", "needs a smaller model"),
        ("model: m\nfallback: draft-model", "needs a smaller model"),
        ("[1, 2]", "holds list"),
        ("model: m\nheads: null", "heads = null: expected text\nhint: write none"),
        ("model: m\nheads: a\nmodel: n", "the key 'model' is given twice, in lines 1 and 3"),
        ("model: m\ndrafter: {name: suffix, name: none}", "the key 'name' is given twice"),
    ],
)  # fmt: skip
def test_wrong_files_name_what_is_wrong(engine_file: Path, text: str, message: str) -> None:
    engine_file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_engine_file(engine_file)
    assert caught.value.message.startswith(str(engine_file))


def test_no_file(engine_file: Path) -> None:
    with pytest.raises(ConfigError, match="no engine file at"):
        read_engine_file(engine_file)
