"""What no run put into an output folder is never replaced."""

import json
import shutil

import pytest

from medusa_kit.errors import ConfigError
from medusa_kit.settings.recipe import dump
from medusa_kit.train import trainer
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.run.own_files import check_own
from medusa_kit.train.trainer import train, train_heads

NAMES = ["recipe.yaml", "metrics.jsonl", "run.json", "bad_update.pt", "heads/config.json",
         "heads/notes.txt", "checkpoint/step-1/weights", "adapter/a", "merged/a",
         "model/a"]  # fmt: skip
JOINT = {"adapter": {"save_merged": False}, "merged": {"save_merged": True},
         "model": {"moves": "full"}}  # fmt: skip


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def refused(monkeypatch):
    """Asserts that a recipe is refused before anything is loaded, and nothing is written."""

    def load(*_, **__):
        raise AssertionError("a base was loaded")

    monkeypatch.setattr(trainer, "load_base", load)
    monkeypatch.setattr(trainer, "check_sources", lambda _: None)

    def check(recipe, folder, match, fresh=False):
        before = contents(folder)
        with pytest.raises(ConfigError, match=match) as caught:
            train(recipe, fresh)
        assert caught.value.hint
        assert contents(folder) == before
        return caught.value

    return check


def put(folder, name, text="mine"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_persons_own_is_refused(make_recipe, refused, tmp_path, name, fresh):
    put(tmp_path / "run", name)
    top = name.partition("/")[0]
    stage = {"stage": "medusa2", "joint": JOINT[top]} if top in JOINT else {}
    error = refused(make_recipe(**stage), tmp_path, "no run of ours put there", fresh)
    assert top in error.message


def test_files_that_a_run_leaves_alone_do_not_matter(
    tiny_base, counting_rows, make_recipe, tmp_path
):
    for name in ("notes.md", "model/weights", "wandb/mine"):
        put(tmp_path / "run", name)
    (tmp_path / "run/heads").mkdir()
    train_heads(tiny_base(), counting_rows(), make_recipe())
    assert (tmp_path / "run/model/weights").read_text() == "mine"


def test_files_of_another_run_that_were_copied_are_a_persons_own(
    tiny_base, counting_rows, make_recipe, refused, tmp_path
):
    train_heads(tiny_base(), counting_rows(), make_recipe())
    for names in (["recipe.yaml"], ["metrics.jsonl"], ["heads"], ["recipe.yaml", "heads"]):
        copy = tmp_path / "-".join(names)
        copy.mkdir()
        for name in names:
            one = tmp_path / "run" / name
            (shutil.copytree if one.is_dir() else shutil.copy)(one, copy / name)
        for fresh in (False, True):
            refused(make_recipe(output_dir=str(copy)), copy, "no run of ours", fresh)


@pytest.mark.parametrize("marked", [True, False])
def test_a_run_of_ours_starts_over_unless_its_recipe_was_edited(
    tiny_base, counting_rows, make_recipe, refused, tmp_path, marked, monkeypatch
):
    """Also one of an earlier version, which left no mark."""
    base, rows, folder = tiny_base(), counting_rows(), tmp_path / "run"
    train_heads(base, rows, make_recipe())
    if not marked:
        (folder / ".medusa-kit-run").unlink()
    path = folder / "recipe.yaml"
    whole = path.read_text()
    path.write_text("# took an hour\n" + whole)
    error = refused(make_recipe(seed=7), folder, "is not as a run wrote it", fresh=True)
    assert "rename it" in error.hint
    path.write_text(whole)
    train_heads(base, rows, make_recipe(seed=7), fresh=True)
    edited = make_recipe(seed=8)
    path.write_text(dump(edited))  # nothing is lost
    train_heads(base, rows, edited, fresh=True)


@pytest.mark.parametrize(
    ("name", "mine"),
    [
        ("model/notes.txt", True), ("model/medusa_heads/tree.json", True),
        ("model/medusa_heads/mine/a", True), ("model/README.md", True),
        ("model/.git/config", True), ("model/medusa_heads/.gitattributes", True),
        ("model/model.before.safetensors", True), ("model/my_config.json", True),
        ("model/medusa_heads/verify.json", True), ("model/medusa_heads/tree.png", True),
        ("model/tokenizer.json", False), ("model/medusa_heads/calibration_answers.jsonl", False),
        ("model/model-00001-of-00002.safetensors", False), ("model/.DS_Store", False),
    ],
)  # fmt: skip
def test_a_persons_own_file_within_a_model_is_not_replaced(make_recipe, tmp_path, name, mine):
    """A whole folder takes the place of what a run of Medusa-2 wrote before."""
    recipe = make_recipe(stage="medusa2", joint={"moves": "full"})
    put(tmp_path / "run", ".medusa-kit-run", "{}")
    record = json.dumps({"versions": {}, "recipe": {}})
    put(tmp_path / "run", "model/medusa_heads/provenance.json", record)
    put(tmp_path / "run", name, "[[0]]" if name.endswith("tree.json") else "mine")
    if mine:
        top = "/".join(name.split("/")[: 3 if "heads" in name else 2])
        with pytest.raises(ConfigError, match=f"no run of ours put there.*: {top}"):
            check_own(tmp_path / "run", recipe, begins=True)
    else:
        check_own(tmp_path / "run", recipe, begins=True)


def joint_recipe(make_recipe, folder, kind):
    source = folder / "rows.jsonl"
    texts = [[{"role": "user", "content": f"{one}?"}, {"role": "assistant", "content": "abcd" * 4}]
             for one in range(8)]  # fmt: skip
    source.write_text("".join(json.dumps({"messages": text}) + "\n" for text in texts))
    return make_recipe(
        stage="medusa2", base={"model": "debug-tiny"}, joint=JOINT[kind],
        data={"sources": [str(source)]}, train={"epochs": 1},
    )  # fmt: skip


@pytest.mark.parametrize("kind", JOINT)
def test_what_a_run_wrote_within_a_model_is_its_own(make_recipe, tmp_path, kind):
    recipe = joint_recipe(make_recipe, tmp_path, kind)
    train(recipe)
    folder = tmp_path / "run"
    assert (folder / kind / "config.json").is_file() == (kind != "adapter")
    assert not (folder / kind / "README.md").exists()  # so that one there is a person's
    for begins in (False, True):
        check_own(folder, recipe, begins=begins)
    for name in ("tokenizer_config.json", "vocab.mine.txt", "model-00001-of-00002.safetensors"):
        copy = tmp_path / "copy" / name
        shutil.copytree(folder, copy)
        put(copy, f"{kind}/{name}", "mine")  # under a name that runs write
        with pytest.raises(ConfigError, match=f"no run of ours put there.*: {kind}/{name}"):
            check_own(copy, recipe, begins=True)


@pytest.mark.parametrize("kind", JOINT)
def test_what_a_person_adds_while_a_run_goes_on_stays(make_recipe, tmp_path, monkeypatch, kind):
    """Each better result replaces the folder of the one before."""
    recipe, folder = joint_recipe(make_recipe, tmp_path, kind), tmp_path / "run" / kind
    names = ("README.md", ".git/config", "medusa_heads/notes.txt")
    begins = RunFolder.begin

    def begin(self):
        begins(self)
        for name in names:
            put(folder, name)

    monkeypatch.setattr(RunFolder, "begin", begin)
    train(recipe)
    assert (folder / "medusa_heads/config.json").is_file()
    assert [(folder / name).read_text() for name in names] == ["mine"] * 3


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", "mine\n"), ("metrics.jsonl", '{"step": 1, "loss": 2.5}\n' * 3),
        ("run.json", '{"mine": 1}'), ("heads/provenance.json", '{"mine": 1}'),
    ],
)  # fmt: skip
def test_a_persons_own_file_in_the_folder_of_a_run_is_told(
    tiny_base, counting_rows, make_recipe, refused, tmp_path, name, text, fresh
):
    """A run that left no checkpoint, and one that is finished."""
    recipe, folder = make_recipe(), tmp_path / "run"
    train_heads(tiny_base(), counting_rows(), recipe)
    put(folder, name, text)
    top = name.partition("/")[0]
    refused(recipe, tmp_path, f"no run of ours put there.*: {top}", fresh)
    if name != "run.json":
        (folder / "run.json").unlink()
        refused(recipe, tmp_path, f"no run of ours put there.*: {top}", fresh)


def test_other_heads_in_the_folder_of_a_run_are_a_persons_own(
    tiny_base, counting_rows, make_recipe, refused, tmp_path
):
    base, other = tiny_base(), make_recipe(seed=5, output_dir=str(tmp_path / "other"))
    train_heads(base, counting_rows(), make_recipe())
    train_heads(base, counting_rows(), other)
    shutil.copy(tmp_path / "other/heads/heads.safetensors", tmp_path / "run/heads")
    refused(make_recipe(), tmp_path, "no run of ours put there.*: heads", fresh=True)


def test_a_run_of_another_stage_has_no_right_to_what_it_never_wrote(
    tiny_base, counting_rows, make_recipe, refused, tmp_path
):
    train_heads(tiny_base(), counting_rows(), make_recipe())
    put(tmp_path / "run", "model/config.json")
    joint = make_recipe(stage="medusa2", joint={"moves": "full"})
    refused(joint, tmp_path, "put there, and this one would replace it: model", fresh=True)


@pytest.mark.parametrize("saved", [True, False])
def test_an_interrupted_run_of_an_earlier_version_is_known(
    tiny_base, counting_rows, make_recipe, tmp_path, saved
):
    recipe = make_recipe()
    folder = RunFolder(recipe)
    with folder.locked():
        folder.begin()
        folder.log({"step": 0, "held_out": {}})
        if saved:
            folder.save(lambda _: None, {"step": 1, "base": "2:a:b"})
    (tmp_path / "run/.medusa-kit-run").unlink()
    RunFolder(recipe).check_own(fresh=True)
    (tmp_path / "run/run.json").write_text(json.dumps({"mine": 1}))
    if not saved:
        (tmp_path / "run/metrics.jsonl").unlink()
        with pytest.raises(ConfigError, match=r"recipe\.yaml, run\.json"):
            RunFolder(recipe).check_own(fresh=True)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_does_not_replace_what_it_reads(make_recipe, refused, tmp_path, fresh):
    heads = str(tmp_path / "run/heads")
    refused(make_recipe(train={"heads_from": heads}), tmp_path, "train.heads_from", fresh)
    joint = {"stage": "medusa2", "base": {"model": str(tmp_path / "run/adapter")}}
    refused(make_recipe(**joint), tmp_path, "base.model", fresh)


def test_a_folder_that_cannot_be_is_refused_first(make_recipe, refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/run"):
        refused(make_recipe(output_dir=str(tmp_path / place)), tmp_path, "file")
    cached = {"features": "disk", "cache_dir": str(tmp_path / "file/cache")}
    refused(make_recipe(train=cached), tmp_path, r"train\.cache_dir")
    (tmp_path / "index.json").write_text('{"mine": 1}')
    cached["cache_dir"] = str(tmp_path)
    refused(make_recipe(train=cached), tmp_path, "not that of a feature cache")
