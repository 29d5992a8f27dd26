"""A run goes on where files of its folder were lost or damaged, or says what is wrong."""

import json
import shutil
import zipfile

import pytest

from medusa_kit.errors import CheckpointError
from medusa_kit.heads import load_heads
from medusa_kit.train import loop
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads

pytestmark = pytest.mark.usefixtures("often")


class Crash(Exception):
    pass


@pytest.fixture
def crashed(tiny_base, counting_rows, make_recipe, monkeypatch):
    """(base, recipe) of a run that crashed in update 7, after an evaluation and a checkpoint."""
    base, recipe = tiny_base(), make_recipe(train={"eval_every": 3})
    original = loop.TrainingLoop._update

    def update(self, arguments):
        if self.step == 7:
            raise Crash
        original(self, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingLoop, "_update", update)
        with pytest.raises(Crash):
            train_heads(base, counting_rows(), recipe)
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


def test_metrics_that_are_no_text_do_not_stop_a_run(crashed, counting_rows):
    base, recipe = crashed
    metrics = RunFolder(recipe).path / "metrics.jsonl"
    metrics.write_bytes(b"\xff\xfe\x00\n" * 40)
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
