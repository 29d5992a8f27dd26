"""A run goes on only with all that it began with, wherever its recipe was made."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from medusa_kit.errors import ConfigError
from medusa_kit.heads import save_heads
from medusa_kit.settings.recipe import TrainRecipe, dump
from medusa_kit.train import preparation
from medusa_kit.train.data import prepare, split
from medusa_kit.train.loop import TrainingLoop
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train, train_heads

REDUCED = {"projection": "reduced", "reduced_size": 12, "num_heads": 2}


class Crash(Exception):
    pass


def stopped(monkeypatch, start, step=6):
    """Run `start` until so many updates are done."""
    original = TrainingLoop._update

    def update(self, arguments):
        if self.step == step:
            raise Crash
        original(self, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_update", update)
        with pytest.raises(Crash):
            start()


@pytest.fixture
def no_hidden_states(monkeypatch):
    """A refusal comes before any hidden state is computed."""

    def computed(*_, **__):
        raise AssertionError("hidden states were computed")

    def forbid():
        monkeypatch.setattr(preparation, "collect_features", computed)

    return forbid


def heads_in(folder, base, rows, recipe):
    """Untrained heads in `folder`, which have the columns of these rows."""
    plain = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"heads_from": None})}
    )
    heads = preparation.new_heads(base, prepare(rows, 2), plain)
    save_heads(heads, folder)
    return heads


@pytest.mark.usefixtures("often")
def test_a_row_that_is_held_out_may_not_change(
    tiny_base, counting_rows, make_recipe, monkeypatch, no_hidden_states
):
    base, recipe, rows = tiny_base(), make_recipe(), counting_rows()
    stopped(monkeypatch, lambda: train_heads(base, rows, recipe))
    _, held_out = split(prepare(rows, 4), recipe.data.eval_fraction, recipe.seed)
    index = next(i for i, row in enumerate(rows) if list(row.input_ids) == held_out[0].input_ids)
    before = rows[index]
    rows[index] = replace(before, input_ids=[*before.input_ids[:-1], 29])
    no_hidden_states()
    with pytest.raises(ConfigError, match="rows held out changed since") as caught:
        train_heads(base, rows, recipe)
    assert "--fresh" in caught.value.hint
    monkeypatch.undo()
    rows[index] = before
    train_heads(base, rows, recipe)


@pytest.mark.parametrize("what", ["weights", "columns"])
@pytest.mark.usefixtures("often")
def test_the_heads_to_go_on_from_may_not_change(
    tiny_base, counting_rows, make_recipe, monkeypatch, no_hidden_states, tmp_path, what
):
    base, rows, earlier = tiny_base(), counting_rows(), tmp_path / "earlier"
    recipe = make_recipe(heads=REDUCED, train={"heads_from": str(earlier)})
    heads = heads_in(earlier, base, rows, recipe)
    stopped(monkeypatch, lambda: train_heads(base, rows, recipe))
    if what == "weights":
        next(iter(heads.parameters())).data += 1
        save_heads(heads, earlier)
    else:  # other text has other frequent tokens
        heads_in(earlier, base, [replace(row, input_ids=[(t + 7) % 29 for t in row.input_ids])
                                 for row in rows], recipe)  # fmt: skip
    no_hidden_states()
    with pytest.raises(ConfigError, match=r"heads in train\.heads_from changed since") as caught:
        train_heads(base, rows, recipe)
    assert "put back the heads" in caught.value.hint


@pytest.mark.usefixtures("often")
def test_columns_and_encodings_may_not_change(tiny_base, counting_rows, make_recipe, monkeypatch):
    """Columns follow from the text, by code that may be of another version by then."""
    base, rows, recipe = tiny_base(), counting_rows(), make_recipe(heads=REDUCED)
    stopped(monkeypatch, lambda: train_heads(base, rows, recipe))
    frequent = preparation.most_frequent_ids
    with monkeypatch.context() as patch:
        patch.setattr(
            preparation, "most_frequent_ids", lambda *a: frequent(*a).clamp(min=20).unique()
        )
        with pytest.raises(ConfigError, match="tokens of the reduced projection changed"):
            train_heads(base, rows, recipe)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_learned_encoding", lambda *_: "1:a:b")
        with pytest.raises(ConfigError, match=r"\.meta\.json say .* changed since"):
            train_heads(base, rows, recipe)
    train_heads(base, rows, recipe)


@pytest.mark.usefixtures("often")
def test_a_checkpoint_of_an_earlier_version_goes_on_and_says_what_was_not_compared(
    tiny_base, counting_rows, make_recipe, monkeypatch, capsys
):
    base, rows, recipe = tiny_base(), counting_rows(), make_recipe(heads=REDUCED)
    stopped(monkeypatch, lambda: train_heads(base, rows, recipe))
    (progress,) = RunFolder(recipe).path.glob("checkpoint/*/progress.json")
    there = json.loads(progress.read_text())
    for name in ("held_out", "heads_from", "columns", "learned", "files"):
        del there[name]
    progress.write_text(json.dumps(there))
    train_heads(base, rows, recipe)
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "earlier version" in one]
    assert line.endswith(
        "its weights and random states, rows held out, tokens of the reduced projection"
    )


@pytest.mark.parametrize("made", ["relative", "path", "copied", "mixed", "elsewhere", "earlier"])
def test_a_recipe_made_in_python_goes_on(monkeypatch, tmp_path, made, capsys):
    """Its paths are whole in the run's own recipe; those of earlier versions were as they came."""
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i} and {i + 1}?", "completion": f"{i * 7} {i * 13}"}) + "\n"
        for i in range(8)
    ))  # fmt: skip
    source = {"mixed": {"source": "d.jsonl", "limit": 8}, "path": Path("d.jsonl")}
    raw = {
        "output_dir": Path("run") if made == "path" else "run",
        "base": {"model": "debug-tiny"},
        "data": {"sources": [source.get(made, "d.jsonl")], "eval_fraction": 0.2},
        "train": {"epochs": 4, "micro_batch_positions": 40, "save_every": 2},
        "heads": {"num_heads": 1},
        "deepspeed": {"enabled": False},
    }
    recipe = TrainRecipe.model_validate(raw)
    if made == "copied":
        recipe = recipe.model_copy(update={"output_dir": Path("other")})
    stopped(monkeypatch, lambda: train(recipe), step=3)
    place = Path("other" if made == "copied" else "run")
    if made == "earlier":
        (place / "recipe.yaml").write_text(dump(recipe))
    if made == "elsewhere":
        os.chdir("/")
        raw |= {"output_dir": str(tmp_path / "run")}
        raw["data"]["sources"] = [str(tmp_path / "d.jsonl")]
        recipe = TrainRecipe.model_validate(raw)
    train(recipe)
    assert "continuing from update 2" in capsys.readouterr().err
    assert (tmp_path / place / "run.json").is_file()
