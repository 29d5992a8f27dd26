"""A run goes on where files of its folder were lost or damaged, or says what is wrong."""

import json
import shutil
import zipfile

import pytest

from medusa_kit.errors import CheckpointError, ConfigError
from medusa_kit.heads import load_heads
from medusa_kit.train import loop
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train, train_heads

pytestmark = pytest.mark.usefixtures("often")


class Crash(Exception):
    pass


def stop_in_update(patch, step):
    original = loop.TrainingLoop._update

    def update(self, arguments):
        if self.step == step:
            raise Crash
        original(self, arguments)

    patch.setattr(loop.TrainingLoop, "_update", update)


def crash_in_update_7(base, rows, recipe, monkeypatch):
    with monkeypatch.context() as patch:
        stop_in_update(patch, 7)
        with pytest.raises(Crash):
            train_heads(base, rows, recipe)


@pytest.fixture
def crashed(tiny_base, counting_rows, make_recipe, monkeypatch):
    """(base, recipe) of a run that crashed in update 7, after an evaluation and a checkpoint."""
    base, recipe = tiny_base(), make_recipe(train={"eval_every": 3})
    crash_in_update_7(base, counting_rows(), recipe, monkeypatch)
    assert (RunFolder(recipe).heads / "heads.safetensors").is_file()
    return base, recipe


def progress_of(recipe):
    (path,) = RunFolder(recipe).path.glob("checkpoint/*/progress.json")
    return path, json.loads(path.read_text())


def cut_off(heads):
    weights = heads / "heads.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


@pytest.mark.parametrize("damage", [shutil.rmtree, cut_off], ids=["lost", "cut off"])
def test_best_heads_that_cannot_be_read_are_replaced(crashed, counting_rows, damage, capsys):
    """Else no later evaluation would be good enough to be kept."""
    base, recipe = crashed
    path, progress = progress_of(recipe)
    path.write_text(json.dumps({**progress, "best": 99.0}))
    damage(RunFolder(recipe).heads)
    report = train_heads(base, counting_rows(), recipe)
    assert "the best heads so far are lost" in capsys.readouterr().err
    assert load_heads(report.heads_folder, base).num_heads == recipe.heads.num_heads


def test_best_heads_that_are_there_are_kept(crashed, counting_rows):
    base, recipe = crashed
    path, progress = progress_of(recipe)
    path.write_text(json.dumps({**progress, "best": 99.0}))
    weights = RunFolder(recipe).heads / "heads.safetensors"
    kept = weights.read_bytes()
    assert train_heads(base, counting_rows(), recipe).best == 99.0
    assert weights.read_bytes() == kept


def test_metrics_that_are_no_text_are_told(crashed, counting_rows):
    """They may be a person's; a run whose metrics are lost goes on."""
    base, recipe = crashed
    metrics = RunFolder(recipe).path / "metrics.jsonl"
    metrics.write_bytes(b"\xff\xfe\x00\n" * 40)
    with pytest.raises(ConfigError, match=r"no run of ours put there.*: metrics\.jsonl"):
        train_heads(base, counting_rows(), recipe)
    metrics.unlink()
    train_heads(base, counting_rows(), recipe)
    assert json.loads(metrics.read_text().splitlines()[-1])["held_out"]


@pytest.mark.parametrize("wrong", [{"step": "4"}, {"best": [1]}, {"seconds": None}])
def test_progress_of_another_type_is_refused(crashed, counting_rows, wrong):
    base, recipe = crashed
    path, progress = progress_of(recipe)
    path.write_text(json.dumps({**progress, **wrong}))
    name, value = next(iter(wrong.items()))
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        train_heads(base, counting_rows(), recipe)
    assert f"{name} is {value!r}" in str(error.value)
    assert path.is_file()


@pytest.mark.parametrize("name", ["state.pt", "random-0.pt"])
def test_state_that_is_cut_off_is_one_line(crashed, counting_rows, name):
    base, recipe = crashed
    state = next(RunFolder(recipe).path.glob(f"checkpoint/*/{name}"))
    state.write_bytes(state.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        train_heads(base, counting_rows(), recipe)
    assert "\n" not in error.value.message


@pytest.mark.parametrize("name", ["state.pt", "random-0.pt"])
def test_a_flipped_bit_in_state_is_told(crashed, counting_rows, name):
    """torch reads on, and other heads would come out."""
    base, recipe = crashed
    state = next(RunFolder(recipe).path.glob(f"checkpoint/*/{name}"))
    with zipfile.ZipFile(state) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    content = bytearray(state.read_bytes())
    header = largest.header_offset
    names = sum(int.from_bytes(content[header + n : header + n + 2], "little") for n in (26, 28))
    content[header + 30 + names + largest.file_size // 2] ^= 64
    state.write_bytes(content)
    with zipfile.ZipFile(state) as archive:
        assert archive.testzip() is not None
    with pytest.raises(CheckpointError, match=r"cannot be read: .* is damaged") as error:
        train_heads(base, counting_rows(), recipe)
    assert "\n" not in error.value.message


def test_a_run_whose_folder_was_moved_goes_on_there(crashed, counting_rows, capsys):
    base, recipe = crashed
    place = RunFolder(recipe).path
    elsewhere = place.rename(place.with_name("elsewhere"))
    moved = recipe.model_copy(update={"output_dir": str(elsewhere)})
    report = train_heads(base, counting_rows(), moved)
    assert "continuing from update" in capsys.readouterr().err
    assert report.heads_folder.is_relative_to(elsewhere)
    assert not place.exists()


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("state.pt", "an earlier checkpoint"), ("average.pt", "an earlier checkpoint"),
        ("state.pt", "another run"), ("average.pt", "another run"), ("random-0.pt", "another run"),
    ],
)  # fmt: skip
def test_files_of_two_checkpoints_are_not_mixed(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path, name, of
):
    base, kept = tiny_base(), tmp_path / "kept"
    train = {"average": 0.9, "save_every": 3}
    recipe = make_recipe(train=train)
    save = RunFolder.save

    def save_and_copy(self, write, progress):
        save(self, write, progress)
        if of == "an earlier checkpoint" and not kept.exists():
            shutil.copytree(next(self.path.glob("checkpoint/*")), kept)

    monkeypatch.setattr(RunFolder, "save", save_and_copy)
    crash_in_update_7(base, counting_rows(), recipe, monkeypatch)
    if of == "another run":
        other = make_recipe(output_dir=str(tmp_path / "other"), seed=5, train=train)
        crash_in_update_7(base, counting_rows(), other, monkeypatch)
        kept = next((tmp_path / "other").glob("checkpoint/*"))
    (here,) = RunFolder(recipe).path.glob("checkpoint/*")
    shutil.copy(kept / name, here / name)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: .* of another checkpoint"):
        train_heads(base, counting_rows(), recipe)
    assert (here / "progress.json").is_file()


@pytest.mark.slow
def test_heads_of_another_run_are_not_those_that_a_run_goes_on_with(
    make_recipe, monkeypatch, tmp_path
):
    """They would be its result, with the score of its own."""
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{one}?", "completion": f"{one} " * 6} for one in range(20)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def recipe(name):
        return make_recipe(
            base={"model": "debug-tiny"}, output_dir=str(tmp_path / name),
            data={"sources": [str(source)], "eval_fraction": 0.4},
            train={"eval_every": 1, "save_every": 2, "epochs": 2},
        )  # fmt: skip

    with monkeypatch.context() as patch:
        stop_in_update(patch, 3)
        for name in ("run", "other"):
            with pytest.raises(Crash):
                train(recipe(name))
    own = tmp_path / "run/heads"
    own.rename(tmp_path / "kept")
    shutil.copytree(tmp_path / "other/heads", own)
    with pytest.raises(ConfigError, match="holds heads of a run that began at"):
        train(recipe("run"))
    shutil.rmtree(own)
    (tmp_path / "kept").rename(own)
    train(recipe("run"))
