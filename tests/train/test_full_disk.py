"""A disk that is full when files are written: one error with path and hint, and nothing is lost."""

import contextlib
import json
import pathlib
import shutil
from types import SimpleNamespace

import pytest
import torch
from processes import make_base, rows
from safetensors.torch import save_file

from medusa_kit.base import adapters
from medusa_kit.errors import MedusaKitError, WriteError
from medusa_kit.files import atomic_write
from medusa_kit.heads import MedusaHeads, load_heads, save_heads
from medusa_kit.heads.convert import convert
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train import loop, preparation, result, trainer
from medusa_kit.train.features.shards import write_shard
from medusa_kit.train.trainer import train_heads

resource = pytest.importorskip("resource", reason="limits the size of files")

TENSORS = {"a": torch.zeros(2000)}
WRITERS = {
    "safetensors": lambda path: save_file(TENSORS, path),
    "torch": lambda path: torch.save(TENSORS, path),
    "text": lambda path: path.write_text("x" * 2000),
}
JOINT = {"lora": {"moves": "lora", "lora": {"rank": 4}}, "full": {"moves": "full"}}


@contextlib.contextmanager
def full_disk(most=1000):
    """A disk that is full, as the process sees it: no file can be written beyond `most` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check(error: MedusaKitError, path: pathlib.Path) -> None:
    assert str(path) in error.message
    assert "\n" not in error.message
    assert "make room" in error.hint


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_gives_one_error_and_the_old_file_stays(tmp_path, writer):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with full_disk(), atomic_write(path) as temporary:
            WRITERS[writer](temporary)

    with pytest.raises(WriteError) as caught:
        write()
    check(caught.value, path)
    assert isinstance(caught.value, OSError)  # for callers that go on without the file
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_other_errors_stay_what_they_are(tmp_path):
    for error in (RuntimeError("shapes differ"), ValueError("no"), FileNotFoundError("gone")):
        with pytest.raises(type(error)) as caught, atomic_write(tmp_path / "file"):
            raise error
        assert not isinstance(caught.value, WriteError)


def test_heads_and_hidden_states_and_copies_in_other_formats(tmp_path):
    base = make_base()
    heads = MedusaHeads.for_base(base, 2, 1, "own")
    save_heads(heads, tmp_path / "heads")
    writes = {
        "new": lambda: save_heads(heads, tmp_path / "new"),
        "shards": lambda: write_shard(tmp_path / "shards", [("a", 2000)], TENSORS, {}),
        "other": lambda: convert(tmp_path / "heads", tmp_path / "other", "vllm"),
    }
    for name, write in writes.items():
        with full_disk(), pytest.raises(WriteError) as caught:
            write()
        check(caught.value, tmp_path / name)


@pytest.fixture
def recipe_of(tmp_path):
    def build(moves):
        return TrainRecipe.model_validate({
            "output_dir": str(tmp_path / "run"), "data": {"sources": ["none"]},
            "base": {"model": "debug-tiny"}, "heads": {"num_heads": 2},
            "deepspeed": {"enabled": False},
            "train": {"loss": "cross_entropy", "micro_batch_positions": 40, "save_every": 1000,
                      "eval_every": 1000, "feature_batch_tokens": 100},
            **({} if moves is None else {"stage": "medusa2", "joint": JOINT[moves]}),
        })  # fmt: skip

    return build


@pytest.mark.parametrize("moves", [None, "lora", "full"])
def test_what_was_trained_is_written_once_there_is_room(recipe_of, monkeypatch, capsys, moves):
    """The disk is full at the end, when heads, adapter or model are written."""
    recipe, keep, updates = recipe_of(moves), result.keep, []

    def keep_on_a_full_disk(*arguments):
        with full_disk():
            keep(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.result, "keep", keep_on_a_full_disk)
        with pytest.raises(WriteError, match=r"step \d+ is safe") as caught:
            train_heads(make_base(), rows(), recipe)
    check(caught.value, pathlib.Path(recipe.output_dir))
    assert "continues from the checkpoint" in caught.value.hint
    monkeypatch.setattr(loop.TrainingLoop, "_update", lambda *_: updates.append(1))
    base = make_base()
    report = train_heads(base, rows(), recipe)
    assert updates == []
    assert report.num_updates > 0
    assert load_heads(report.heads_folder, base, force=True).num_heads == 2
    assert not (pathlib.Path(recipe.output_dir) / "checkpoint").exists()


def test_a_checkpoint_that_does_not_fit_is_one_error(recipe_of, monkeypatch):
    """torch's writer raises a RuntimeError that says nothing of a disk."""
    recipe, save = recipe_of(None), loop.TrainingLoop.save

    def save_on_a_full_disk(self):
        with full_disk():
            save(self)

    monkeypatch.setattr(loop.TrainingLoop, "save", save_on_a_full_disk)
    with pytest.raises(WriteError, match=r"as on a full disk.*nothing is safe") as caught:
        train_heads(make_base(), rows(), recipe)
    check(caught.value, pathlib.Path(recipe.output_dir))


def test_a_merged_model_that_does_not_fit_is_written_later(recipe_of, monkeypatch):
    recipe = recipe_of("lora")
    joint = recipe.joint.model_copy(update={"save_merged": True})
    recipe = recipe.model_copy(update={"joint": joint})
    merged, base = result.save_merged, make_base()

    def on_a_full_disk(found):
        with full_disk():
            merged(found)

    def merge_in_memory(source, **options):
        other = make_base()
        other._model = adapters.merge_into(other.own_model, pathlib.Path(source))
        return other

    monkeypatch.setattr(result, "load_base_model", merge_in_memory)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.result, "save_merged", on_a_full_disk)
        with pytest.raises(WriteError) as caught:
            train_heads(base, rows(), recipe)
    check(caught.value, pathlib.Path(recipe.output_dir) / "merged")
    train_heads(make_base(), rows(), recipe)
    assert json.loads((pathlib.Path(recipe.output_dir) / "merged/config.json").read_text())


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_hidden_states(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path
):
    def computed(*_, **__):
        raise AssertionError("hidden states were computed")

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "collect_features", computed)
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(WriteError, match="heads and a checkpoint take") as caught:
            train_heads(tiny_base(), counting_rows(), make_recipe())
        assert "make room" in caught.value.hint
    assert not (tmp_path / "run").exists()
    train_heads(tiny_base(), counting_rows(), make_recipe())
