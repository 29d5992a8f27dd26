"""What is trained is updated in float32, in every stage, under every engine and in any dtype."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from processes import make_base, rows

from medusa_kit.errors import ConfigError
from medusa_kit.train import loop
from medusa_kit.train.data import prepare, split
from medusa_kit.train.engine import PlainEngine, make_engine
from medusa_kit.train.preparation import prepare_run
from medusa_kit.train.run import identity
from medusa_kit.train.stages import Medusa2
from medusa_kit.train.trainer import train_heads

STAGES = range(4) if os.environ.get("MEDUSA_KIT_CASES") == "all" else (0, 3)  # of ZeRO
TINY = 1e-7  # a learning rate: AdamW's first step, far below what 16 bits tell apart
RUNS = {
    "medusa1": {"stage": "medusa1"},
    "lora": {"stage": "medusa2", "joint": {"moves": "lora", "lora": {"rank": 4}}},
    "full": {"stage": "medusa2", "joint": {"moves": "full"}},
}
# Prints, for each run, how many weights had a gradient, and how many of these moved by one update.
CHILD = """
import contextlib, json, os, sys, torch
sys.path.insert(0, sys.argv[1])
from processes import make_base, rows
from test_masters import TINY, one_update, recipe_of
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu")
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
from deepspeed.utils import safe_get_full_fp32_param
from medusa_kit.train.engine import make_engine

def masters(engine, module):
    if groups := getattr(engine.optimizer, "fp32_groups", None):  # ZeRO stage 0 in 16 bits
        return [weight.detach().clone() for group in groups for weight in group]
    trained = [p for p in module.parameters() if p.requires_grad]
    found = [safe_get_full_fp32_param(p) for p in trained]
    return [(p if master is None else master).detach().clone()
            for p, master in zip(trained, found)]

found = {}
for name, sections in json.loads(sys.argv[2]).items():
    with contextlib.redirect_stdout(sys.stderr):
        engine, before, after = one_update(recipe_of(name, **sections), masters)
    found[name] = {
        "moved": sum(int((a != b).sum()) for a, b in zip(after, before)),
        "dtypes": sorted({str(weight.dtype) for weight in (*before, *after)}),
    }
print(json.dumps(found))
"""


def recipe_of(folder, **sections):
    from medusa_kit.settings.recipe import TrainRecipe

    train = {"loss": "cross_entropy", "micro_batch_positions": 40, "feature_batch_tokens": 100,
             "save_every": 1, "epochs": 2}  # fmt: skip
    return TrainRecipe.model_validate({
        "output_dir": str(folder), "data": {"sources": ["none"]}, "heads": {"num_heads": 2},
        "base": {"model": "debug-tiny", "dtype": "bfloat16"}, "deepspeed": {"enabled": False},
        **sections, "train": train | sections.get("train", {}),
    })  # fmt: skip


def one_update(recipe, weights):
    """(engine, its masters before, after) one update with a tiny learning rate. No matrix begins at
    zero, so that all of them have gradients."""
    base = make_base(recipe.base.dtype)
    training, held_out = split(prepare(rows(), 2), 0.2, 0)
    run = prepare_run(base, training, held_out, recipe)
    torch.manual_seed(0)
    for weight in run.module.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    engine = make_engine(run.module, recipe, base.device)
    before = weights(engine, run.module)
    update = next(iter(run.feed.epoch(0)))
    terms = run.module.terms(update.ahead_PJ)
    for batch in update.batches:
        engine.backward(engine.forward(batch, terms).loss)
    engine.update(TINY)
    return engine, before, weights(engine, run.module)


def trained(engine, module):
    return [p.detach().clone() for p in module.parameters() if p.requires_grad]


def moved(recipe):
    _, before, after = one_update(recipe, trained)
    assert {weight.dtype for weight in after} == {torch.float32}
    return sum(int((a != b).sum()) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["medusa1", "lora"])
def test_as_many_weights_move_on_a_base_in_16_bits(tmp_path, name, optimizer):
    options = {**RUNS[name], "train": {"optimizer": optimizer}}
    low = moved(recipe_of(tmp_path, **options))
    precise = moved(
        recipe_of(tmp_path, **options, base={"model": "debug-tiny", "dtype": "float32"})
    )
    assert low >= 0.99 * precise > 0


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
def test_every_zero_stage_moves_as_many(tmp_path):
    """Where the whole base trains in 16 bits, DeepSpeed's float32 copies are what is looked at."""
    runs = {
        f"{name} {stage}": {**RUNS[name], "deepspeed": {"zero_stage": stage}}
        for name in ("lora", "full")
        for stage in STAGES
    }
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path.joinpath(__file__).parent), json.dumps(runs)],
        capture_output=True, text=True, timeout=300, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout.splitlines()[-1])  # gloo prints too (torch 2.9)
    for name in ("lora", "full"):
        precise = moved(
            recipe_of(tmp_path, **RUNS[name], base={"model": "debug-tiny", "dtype": "float32"})
        )
        for stage in STAGES:
            one = found[f"{name} {stage}"]
            assert one["dtypes"] == ["torch.float32"], (name, stage)
            assert one["moved"] >= 0.99 * precise, (name, stage)


def test_weights_in_16_bits_are_refused_wherever_they_come_from(tmp_path):
    """The recipe says float32, the base that is handed over is in another dtype."""
    recipe = recipe_of(tmp_path, **RUNS["full"], base={"model": "debug-tiny", "dtype": "float32"})
    with pytest.raises(ConfigError, match="would be trained in") as caught:
        train_heads(make_base("bfloat16"), rows(), recipe)
    assert "float32" in caught.value.hint


class Crash(Exception):
    pass


@pytest.fixture
def begun_in_16_bits(tmp_path, monkeypatch):
    """The recipe of a run whose adapters were in bfloat16, stopped after an update, as versions
    before TRAINED_IN wrote it."""
    from support.checkpoints import note_files  # not where CHILD imports this file

    recipe = recipe_of(tmp_path / "run", **RUNS["lora"])

    def stop(self):
        original(self)
        raise Crash

    original = loop.TrainingLoop.save
    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingLoop, "save", stop)
        with pytest.raises(Crash):
            train_heads(make_base("bfloat16"), rows(), recipe)
    (folder,) = (tmp_path / "run/checkpoint").iterdir()
    state = torch.load(folder / "state.pt", weights_only=True)
    state["weights"] = {name: weight.bfloat16() if "lora" in name else weight
                        for name, weight in state["weights"].items()}  # fmt: skip
    torch.save(state, folder / "state.pt")
    note_files(folder)
    return recipe, folder / "progress.json"


@pytest.mark.parametrize("written", [True, False])
def test_runs_begun_in_16_bits_are_refused_with_a_hint(begun_in_16_bits, written):
    recipe, progress = begun_in_16_bits
    there = json.loads(progress.read_text())
    if not written:
        assert there.pop(identity.TRAINED_IN) == "float32"
        progress.write_text(json.dumps(there))
    with pytest.raises(ConfigError, match="float32 now") as caught:
        train_heads(make_base("bfloat16"), rows(), recipe)
    assert "--fresh" in caught.value.hint
    assert train_heads(make_base("bfloat16"), rows(), recipe, fresh=True).num_updates > 0


def test_a_plain_engine_looks_at_every_weight(tmp_path):
    recipe = recipe_of(tmp_path, **RUNS["lora"])
    training, held_out = split(prepare(rows(), 2), 0.2, 0)
    run = prepare_run(make_base("bfloat16"), training, held_out, recipe)
    assert isinstance(run.module, Medusa2)
    run.module.heads.to(torch.float16)
    with pytest.raises(ConfigError, match="float16"):
        PlainEngine(run.module, recipe, torch.device("cpu"))
