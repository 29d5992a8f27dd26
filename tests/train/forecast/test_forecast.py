"""What `--dry-run` predicts, against runs: peak, files, and reports without text or weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from medusa_kit.cli.quick import run_quick
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.forecast import from_config, trial
from medusa_kit.train.forecast.dry_run import dry_run
from medusa_kit.train.needs import SIZES
from medusa_kit.train.trainer import train

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes/debug.yaml"
# Prints what a dry run says, and then a run's peak in bytes.
RUN = """
import resource, sys
from pathlib import Path
from medusa_kit.infer.runners.backends import check_base
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.forecast.dry_run import dry_run
from medusa_kit.train.trainer import train
recipe = load_recipe(Path(sys.argv[1]), sys.argv[2:])
print(dry_run(recipe, check_base, base_for_decoding))
assert not Path(recipe.output_dir).exists()
train(recipe, False, check_base, base_for_decoding)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def recipe_of(tmp_path, *overrides):
    options = ["base.device=cpu", "deepspeed.enabled=false", f"output_dir={tmp_path / 'run'}"]
    return load_recipe(RECIPE, [*options, *overrides])


def table(said):
    """The table's rows, as numbers."""
    lines = said.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:2] == ["training", "tokens"])
    rows = [line.replace(",", "").split() for line in lines[first + 1 : first + 4]]
    return [[float(cell) for cell in row] for row in rows]


def check_table(said):
    rows = table(said)
    assert [row[0] for row in rows] == list(SIZES)
    for column in (1, 2, 3):
        assert [row[column] for row in rows] == sorted(row[column] for row in rows)
    assert rows[2][1] > 0


def told(said, before):
    """The size that follows these words, in bytes."""
    number, unit = said.split(before)[1].split()[:2]
    return float(number) * {"GB": 1e9, "MB": 1e6}[unit[:2]]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak as Linux tells it")
@pytest.mark.parametrize("overrides", [
    ["heads.projection=own", "train.optimizer=muon", "train.features=disk"],
], ids=" ".join)  # fmt: skip
def test_the_peak_is_the_runs(tmp_path, overrides):
    options = ["base.device=cpu", "deepspeed.enabled=false", f"output_dir={tmp_path}/run"]
    if "train.features=disk" in overrides:
        options.append(f"train.cache_dir={tmp_path}/cache")

    child = subprocess.run(
        [sys.executable, "-c", RUN, str(RECIPE), *options, *overrides],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    said, real = child.stdout, float(child.stdout.splitlines()[-1])
    assert told(said, "peak of the process ") == pytest.approx(real, rel=0.25)


@pytest.mark.parametrize("overrides", [
    ["heads.save_dtype=bfloat16"],
    ["stage=medusa2", "joint.save_merged=true", "heads.save_dtype=int8"],
    ["heads.projection=own", "heads.num_heads=2", "train.average=0.9"],
], ids=" ".join)  # fmt: skip
def test_files_have_the_sizes_that_were_told(tmp_path, overrides, monkeypatch):
    recipe = recipe_of(tmp_path, *overrides)
    said = dry_run(recipe)
    saved = []

    def keep_them(self):
        (folder,) = self._checkpoints.glob("step-*")
        saved.append(sum((folder / name).stat().st_size for name in ("state.pt", "average.pt")
                         if (folder / name).is_file()))  # fmt: skip

    from medusa_kit.train.run import folder

    drop = folder.RunFolder._drop_checkpoints

    def drop_and_look(self, keep=None):
        if keep is None and not saved:
            keep_them(self)
        drop(self, keep)

    monkeypatch.setattr(folder.RunFolder, "_drop_checkpoints", drop_and_look)
    report = train(recipe)
    room = 25_000  # headers and names
    heads = (report.heads_folder / "heads.safetensors").stat().st_size
    assert told(said, "written, about: heads ") == pytest.approx(heads, abs=room)
    assert told(said, "a checkpoint ") == pytest.approx(saved[0], abs=3 * room, rel=0.05)
    run = tmp_path / "run"
    if recipe.stage == "medusa2":
        adapter = (run / "adapter/adapter_model.safetensors").stat().st_size
        assert told(said, "adapter ") == pytest.approx(adapter, abs=room)
        merged = (run / "merged/model.safetensors").stat().st_size
        assert told(said, "merged model ") == pytest.approx(merged, abs=room, rel=0.05)
        in_merged = (run / "merged/medusa_heads/heads.safetensors").stat().st_size
        assert in_merged == heads
    check_table(said)


@pytest.mark.parametrize("stage", ["medusa1", "medusa2"])
def test_without_any_answer_rows_are_assumed(tmp_path, monkeypatch, stage):
    monkeypatch.chdir(tmp_path)
    said = dry_run(recipe_of(tmp_path, f"stage={stage}", "data.sources=[answers.jsonl]",
                             "train.feature_batch_tokens=900"))  # fmt: skip
    assert "no text yet (no data file at answers.jsonl)" in said
    assert "192 of them answers, are assumed" in said
    check_table(said)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_base_is_tried_with_one_forward_and_that_is_said(tmp_path, monkeypatch, capsys):
    """Its figures are those of two, since one forward is as large as a run's."""
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(tmp_path, "data.sources=[answers.jsonl]", "train.feature_batch_tokens=900",
                       "train.micro_batch_positions=8")  # fmt: skip
    read = []
    for slow in (float("inf"), -1.0):
        monkeypatch.setattr(trial, "SLOW", slow)
        monkeypatch.setattr(
            trial, "_update", lambda run, *_: read.append(run.num_positions) or (1.0, 1.0)
        )
        check_table(dry_run(recipe))
        said = capsys.readouterr().err
        assert ("trying out a forward of 900 tokens and an update: about" in said) == (slow < 0)
    assert read[0] == 2 * read[1]


@pytest.fixture
def described(tmp_path):
    """A folder with a config alone, as of a model that was not downloaded."""
    config = LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=128,
                         num_hidden_layers=2, num_attention_heads=4)  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    folder = tmp_path / "base"
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("overrides", [
    ["stage=medusa1"],
    ["stage=medusa1", "heads.kind=recurrent", "heads.projection=reduced", "heads.reduced_size=100"],
    ["stage=medusa2"],
    ["stage=medusa2", "joint.moves=full"],
], ids=" ".join)  # fmt: skip
def test_a_config_is_enough(tmp_path, described, monkeypatch, overrides):
    monkeypatch.setattr(from_config, "products_a_second", lambda *_: 1e9)
    recipe = recipe_of(tmp_path, f"base.model={described}", *overrides)
    said = dry_run(recipe)
    assert "its weights are not on this machine" in said
    check_table(said)
    # The same numbers as where the weights are there.
    config = LlamaConfig.from_pretrained(described)
    from transformers import LlamaForCausalLM

    from medusa_kit.base.gguf import byte_tokenizer

    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(described)
    byte_tokenizer().save_pretrained(described)
    measured = dry_run(recipe)
    assert said.splitlines()[0] == measured.splitlines()[0]
    (one,), (other,) = ([line for line in text.splitlines() if line.startswith("written")]
                        for text in (said, measured))  # fmt: skip
    assert one.split(" for ")[0] == other.split(" for ")[0]


def test_a_quick_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "p.txt").write_text("".join(f"Count to {i}.\n" for i in range(40)))
    monkeypatch.chdir(tmp_path)
    run_quick([], "debug-tiny", "p.txt", 2.0, None, "cpu", False, dry_run=True, engine="vllm")
    said = capsys.readouterr()
    assert "heads of kind medusa for vLLM" in said.err.splitlines()[0]
    assert said.out.splitlines()[-1].startswith("verdict")
    assert [path.name for path in tmp_path.iterdir()] == ["p.txt"]
