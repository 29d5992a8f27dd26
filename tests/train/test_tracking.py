"""Weights & Biases: refused before anything is done, and each training ends its own run."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ValidationError

from medusa_kit.errors import ConfigError
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train import trainer
from medusa_kit.train.loop import TrainingLoop
from medusa_kit.train.trainer import train, train_heads


class Runs:
    """A stand-in for wandb. `init`, in place of its own, may raise."""

    def __init__(self, monkeypatch, refusal=None):
        self.refusal, self.begun, self.lines, self.ended = refusal, [], [], []
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=self.init))

    def init(self, **options):
        folder = Path(options["dir"]) / "wandb"
        folder.mkdir(exist_ok=True)
        (folder / "debug.log").write_text("")
        if self.refusal is not None:
            raise self.refusal
        number = len(self.begun)
        self.begun.append(options)
        return SimpleNamespace(
            id=f"run-{number}", log=lambda line, step: self.lines.append((number, step)),
            finish=lambda exit_code=0: self.ended.append((number, exit_code)),
        )  # fmt: skip


def mode_refused():
    class Settings(BaseModel):
        mode: bool

    try:
        Settings.model_validate({"mode": "nonsense"})
    except ValidationError as error:
        return error


REFUSALS = {
    "key": (RuntimeError("No API key configured.\n Use `wandb login` to log in."), "No API key"),
    "mode": (mode_refused(), "mode: Input should be"),
    "network": (TimeoutError("no answer in 30 s"), "no answer in 30 s"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_wandb_refuses_is_one_error_before_anything_is_done(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path, name
):
    train_heads(tiny_base(), counting_rows(), make_recipe())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refusal, words = REFUSALS[name]
    Runs(monkeypatch, refusal)

    def load(*_, **__):
        raise AssertionError("a base was loaded")

    monkeypatch.setattr(trainer, "load_base", load)
    monkeypatch.setattr(trainer, "check_sources", lambda _: None)
    recipe = make_recipe(logging={"wandb": True}, seed=3)
    with pytest.raises(ConfigError, match=words) as caught:
        train(recipe, fresh=True)
    assert "\n" not in caught.value.message
    assert "logging.wandb=false" in caught.value.hint
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    assert not (tmp_path / "run/wandb").exists()


@pytest.mark.parametrize("project", ["team/heads", "", "a" * 129, "50%", "a:b", "a\\b"])
def test_a_project_that_has_no_name_is_refused_first(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path, project
):
    runs = Runs(monkeypatch)
    recipe = make_recipe(logging={"wandb": True, "project": project})
    with pytest.raises(ConfigError, match=r"logging\.project") as caught:
        train_heads(tiny_base(), counting_rows(), recipe)
    assert caught.value.hint
    assert not runs.begun
    assert not (tmp_path / "run").exists()


def test_each_training_ends_its_own_run(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path
):
    """A run that the calling program has goes on beside it."""
    runs = Runs(monkeypatch)
    recipes = [make_recipe(output_dir=str(tmp_path / name), logging={"wandb": True})
               for name in ("a", "b", "c")]  # fmt: skip
    for recipe in recipes[:2]:
        train_heads(tiny_base(), counting_rows(), recipe)
    assert runs.ended == [(0, 0), (1, 0)]
    assert {step for number, step in runs.lines if number == 0} == {
        step for number, step in runs.lines if number == 1
    }

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingLoop, "_update", broken)
    with pytest.raises(KeyboardInterrupt):
        train_heads(tiny_base(), counting_rows(), recipes[2])
    assert runs.ended[2:] == [(2, 1)]
    assert {options["reinit"] for options in runs.begun} == {"create_new"}


def test_a_run_that_cannot_be_ended_is_told_and_changes_nothing(
    tiny_base, counting_rows, make_recipe, monkeypatch, capsys
):
    runs = Runs(monkeypatch)

    def init(**options):
        def finish():
            raise OSError("the network is gone")

        run = runs.init(**options)
        run.finish = finish
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    recipe: TrainRecipe = make_recipe(logging={"wandb": True})
    assert train_heads(tiny_base(), counting_rows(), recipe).num_updates
    assert "wandb did not end its run: the network is gone" in capsys.readouterr().err
