"""What becomes NaN or infinite in training ends the run with the update and the reason, and takes
the place of nothing that was good; a score that is no number is a miss."""

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import note_files
from support.samples import ALL
from support.small_engines import random_heads
from support.tiny_models import VOCAB
from support.tiny_models import tiny_base as other_base

from medusa_kit.base.loading import load_base_model
from medusa_kit.data.chat import EncodedExample
from medusa_kit.errors import CheckpointError, NotFiniteError
from medusa_kit.heads import load_heads
from medusa_kit.heads.ranks import MISSING, _ranks
from medusa_kit.train import loop
from medusa_kit.train.evaluate import evaluate
from medusa_kit.train.features.features import Positions
from medusa_kit.train.quality import Readings, compare
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads
from medusa_kit.tree.dynamic import best_first
from medusa_kit.tuning.temperature import fit_temperatures

NAN, INF = math.nan, math.inf
UPDATE = loop.TrainingLoop._update


def at_step(monkeypatch, step, spoil):
    """`spoil(loop, update)` before the update after `step` others."""

    def update(self, of):
        if self.step == step:
            spoil(self, of)
        UPDATE(self, of)

    monkeypatch.setattr(loop.TrainingLoop, "_update", update)


def weight(self, name="blocks.1.0.linear.weight"):
    return dict(self.engine.module.heads.named_parameters())[name]


def one_number(self, _):
    weight(self).data[3, 3] = NAN


def gradients(self, _):
    weight(self).register_hook(lambda gradient: gradient * INF)


def overflow(self, _):
    """The update leaves infinite weights."""
    step = self.engine.optimizer.step

    def leaves_infinity():
        step()
        weight(self).data.fill_(INF)

    self.engine.optimizer.step = leaves_infinity


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [(one_number, r"at update 6 of \d+ \(heads\[1\]\); weights are NaN or infinite: heads\[1\]"),
     (gradients, "the norm of the gradients is (nan|inf) at update 6"),
     (overflow, r"loss is nan at update 7 .*infinite: heads\[1\]")],
)  # fmt: skip
@pytest.mark.parametrize("train", [{}, {"keep": "last"}, {"accumulation": 2}, {"average": 0.9}])
def test_a_run_ends_before_anything_is_lost(
    tiny_base, counting_rows, make_recipe, monkeypatch, spoil, said, train
):
    base, rows = tiny_base(), counting_rows(24)
    recipe = make_recipe(heads={"num_heads": 2}, train={"epochs": 6, **train})
    folder = RunFolder(recipe)
    at_step(
        monkeypatch, 5, lambda self, update: (kept.append(files(folder.path)), spoil(self, update))
    )
    kept = []
    with pytest.raises(NotFiniteError, match=said):
        train_heads(base, rows, recipe)
    assert files(folder.path) == kept[0]
    assert folder.load().progress["step"] == 4
    if train.get("keep") != "last":
        assert all(one.isfinite().all() for one in load_heads(folder.heads, base).parameters())
    lines = (folder.path / "metrics.jsonl").read_text()
    assert "NaN" not in lines


@pytest.mark.parametrize("train", [{}, {"keep": "last"}])
def test_weights_that_overflow_in_the_last_update(tiny_base, counting_rows, make_recipe, train):
    """Nothing is kept of them, and the heads that training began with stay."""
    base = tiny_base()
    first = make_recipe(output_dir="first", heads={"num_heads": 2}, train={"epochs": 1})
    train_heads(base, counting_rows(), first)
    second = make_recipe(
        heads={"num_heads": 2},
        train={"epochs": 1, "micro_batch_positions": 4000, "heads_from": "first/heads",
               "learning_rate": 1e38, **train},
    )  # fmt: skip
    with pytest.raises(NotFiniteError, match=r"after update 1 of 1: heads\[0\]"):
        train_heads(base, counting_rows(), second)
    run = RunFolder(second)
    assert not (run.path / "run.json").exists()
    assert run.load() is None
    if not train:
        kept = load_heads(run.heads, base)
        begun = load_heads(RunFolder(first).heads, base)
        pairs = zip(kept.parameters(), begun.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("where", ["weights", "optimizer", "average"])
def test_a_checkpoint_without_numbers_is_refused(
    tiny_base, counting_rows, make_recipe, monkeypatch, where
):
    base, recipe = tiny_base(), make_recipe(train={"save_every": 2, "average": 0.9})
    at_step(monkeypatch, 3, lambda self, update: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train_heads(base, counting_rows(), recipe)
    monkeypatch.undo()
    folder = RunFolder(recipe).load().folder
    path = folder / ("average.pt" if where == "average" else "state.pt")
    state = torch.load(path)
    if where == "optimizer":
        state["optimizer"]["state"][0]["exp_avg"][0] = NAN
    else:
        next(iter((state if where == "average" else state["weights"]).values()))[0] = NAN
    torch.save(state, path)
    note_files(folder)
    with pytest.raises(CheckpointError, match=r"step-00000002 holds NaN(.|\n)*--fresh"):
        train_heads(base, counting_rows(), recipe)


@pytest.mark.parametrize("features", ["memory", "disk", "live"])
@pytest.mark.parametrize("rows", ["held out", "trained"])
def test_hidden_states_that_are_no_numbers_are_the_bases_fault(
    tiny_base, counting_rows, make_recipe, monkeypatch, rows, features
):
    base = tiny_base()
    if rows == "trained":
        monkeypatch.setattr(loop.TrainingLoop, "judge", lambda self, keep=True: None)
    base.model.get_input_embeddings().weight.data[7] = NAN
    with pytest.raises(NotFiniteError, match=r"since hidden states of the base(.|\n)*hint: .*base"):
        train_heads(base, counting_rows(), make_recipe(train={"features": features}))


@pytest.mark.parametrize("moves", ["lora", "full"])
def test_weights_of_the_base_that_were_no_numbers_before(make_recipe, moves):
    """Lower learning rates would not mend them."""
    base = load_base_model("debug-tiny")
    base.model.get_input_embeddings().weight.data[40] = NAN
    recipe = make_recipe(
        stage="medusa2", base={"model": "debug-tiny"}, heads={"num_heads": 2},
        train={"epochs": 1, "micro_batch_positions": 30}, joint={"moves": moves},
    )  # fmt: skip
    ids = base.tokenizer("to be or not").input_ids
    rows = [EncodedExample([*ids, 40, row, *ids], [True] * 26, row) for row in range(12)]
    with pytest.raises(NotFiniteError, match=r"embed_tokens(.|\n)*hint: weights of the base"):
        train_heads(base, rows, recipe)


def test_hidden_states_too_large_for_the_disk(tiny_base, counting_rows, make_recipe):
    """They would be infinite there, and the base is not to blame."""
    base = tiny_base()
    base.model.model.norm.weight.data.fill_(1e6)
    train = {"features": "disk", "cache_dtype": "float16"}
    with pytest.raises(NotFiniteError, match=r"float16 reaches(.|\n)*hint: set train.cache_dtype"):
        train_heads(base, counting_rows(), make_recipe(train=train))
    wider = make_recipe(train={**train, "epochs": 1, "cache_dtype": "bfloat16"})
    train_heads(base, counting_rows(), wider)


@pytest.mark.parametrize("moves", ["lora", "full"])
def test_medusa_2(make_recipe, monkeypatch, moves):
    base = load_base_model("debug-tiny")
    rows = [
        EncodedExample(base.tokenizer(chr(65 + row) + "to be or not").input_ids, [True] * 13, row)
        for row in range(12)
    ]

    def spoil(self, _):
        trained = [p for p in self.engine.module.model.parameters() if p.requires_grad]
        trained[-1].data.view(-1)[0] = NAN

    at_step(monkeypatch, 2, spoil)
    recipe = make_recipe(
        stage="medusa2", base={"model": "debug-tiny"}, heads={"num_heads": 2},
        train={"epochs": 4, "micro_batch_positions": 30, "save_every": 2, "eval_every": 2},
        joint={"moves": moves},
    )  # fmt: skip
    with pytest.raises(
        NotFiniteError,
        match=r"loss is nan at update 3 .*the base.*infinite: model\.",
    ):
        train_heads(base, rows, recipe)
    folder = RunFolder(recipe)
    assert folder.load().progress["step"] == 2
    for path in folder.path.rglob("*.safetensors"):
        from safetensors.torch import load_file

        assert all(one.isfinite().all() for one in load_file(path).values()), path


def test_numbers_too_large_for_the_stored_dtype(tiny_base, counting_rows, make_recipe, monkeypatch):
    def spoil(self, _):
        weight(self).data[0, 0] = 1e5

    at_step(monkeypatch, 2, spoil)
    recipe = make_recipe(heads={"num_heads": 2, "save_dtype": "float16"}, train={"keep": "last"})
    with pytest.raises(NotFiniteError, match=r"blocks.1.*float16(.|\n)*heads.save_dtype"):
        train_heads(tiny_base(), counting_rows(), recipe)
    assert not (RunFolder(recipe).heads / "heads.safetensors").exists()


@pytest.mark.parametrize("zero", [None, 0, 2, 3] if ALL else [None, 2])
def test_several_processes_end_together(tmp_path, zero):
    if zero is not None and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    engine = {"enabled": zero is not None, "zero_stage": zero or 0}
    runs = {"run": {"deepspeed": engine, "train": {"learning_rate": 1e37, "keep": "best",
                                                   "micro_batch_positions": 40}}}  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port),
            "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__).parent / "processes.py"), str(tmp_path)]
        workers.append(subprocess.Popen([*command, json.dumps(runs)], env=environment,
                                        stderr=subprocess.PIPE, text=True))  # fmt: skip
    errors = [worker.communicate(timeout=400)[1] for worker in workers]
    for error in errors:
        assert "NotFiniteError" in error, error[-3000:]
    assert not (tmp_path / "run/heads").exists()
    assert not list((tmp_path / "run/checkpoint").glob("step-*"))


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_a_rank_of_no_number_is_a_miss(number):
    truth_C, good = torch.tensor([5, 5, 5]), torch.linspace(0, 1, 9)
    of_all, of_truth, of_another = torch.full((9,), number), good.clone(), good.clone()
    of_truth[5] = of_another[2] = number
    ranks = _ranks(torch.stack([of_all, of_truth, of_another]), truth_C, 9).tolist()
    above = 3 if number == -INF else 4  # what is beside it, and those that are higher
    assert ranks == [MISSING, MISSING, above]


def test_heads_without_numbers_score_nothing():
    heads = random_heads(other_base("llama"), 2)
    for parameter in heads.blocks[1].parameters():
        parameter.data.fill_(NAN)
    hidden_PD, ahead_PJ = torch.randn(60, 32), torch.randint(0, VOCAB, (60, 3), dtype=torch.int32)
    for end in (19, 39, 59):
        ahead_PJ[end, 1:] = ahead_PJ[end - 1, 2:] = -1
    none = torch.empty(60, 0)
    store = Positions.without_runners_up(hidden_PD, ahead_PJ, none, none)
    scores = evaluate(heads, store, 16, np.array([0, 20, 40]))
    assert (scores.top1[1], scores.top5[1]) == (0, 0)
    assert scores.without_loss == ["heads[1]"]
    assert scores.acceptance_length < 1.5
    assert json.loads(json.dumps(scores.as_dict()))["loss"][1] is None


def test_temperatures_are_fitted_to_numbers_alone():
    heads = random_heads(other_base("llama"), 2)
    hidden_PD, ahead_PJ = torch.randn(60, 32), torch.randint(0, VOCAB, (60, 3), dtype=torch.int32)
    expected = fit_temperatures(heads, hidden_PD, ahead_PJ)
    damaged = torch.cat([hidden_PD, torch.full((5, 32), NAN)])
    assert fit_temperatures(heads, damaged, torch.cat([ahead_PJ, ahead_PJ[:5]])) == expected
    assert fit_temperatures(heads, damaged[60:], ahead_PJ[:5]) == (1.0, 1.0)


def test_paths_without_a_chance_are_not_in_a_dynamic_tree():
    tokens, _, scores = best_first(1, lambda path: [(7, NAN), (8, -1.0), (9, -INF)], 2, 9)
    assert tokens == [1, 8, 8]
    assert scores == [0, -1, -2]


def test_a_perplexity_beyond_all_numbers():
    reading = Readings(torch.full((3,), 1e4), torch.zeros(3), np.array([0]))
    assert reading.perplexity == INF
    assert compare(reading, reading).as_dict()["perplexity_after"] is None
