"""What a run keeps, reports and writes."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from medusa_kit import console
from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.heads import MedusaHeads, load_heads
from medusa_kit.train import loop, result, trainer
from medusa_kit.train.data import APART, prepare
from medusa_kit.train.evaluate import HeadScores, answer_starts, evaluate, simulated_acceptance
from medusa_kit.train.features.features import FeatureOptions, collect_features
from medusa_kit.train.preparation import Run
from medusa_kit.train.processes import sharded_base
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.run.provenance import git_state, versions
from medusa_kit.train.trainer import own_device, train_heads
from medusa_kit.tree import CandidateTree, RankStatistics
from medusa_kit.tree.replay import replay

pytestmark = pytest.mark.usefixtures("often")


def held_out_lines(recipe):
    lines = (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "held_out" in line]


def test_the_best_heads_by_simulated_acceptance_are_kept(
    tiny_base, counting_rows, make_recipe, tmp_path
):
    """A learning rate that ruins the heads in the end: the best are from before."""
    base, kept = tiny_base(), {}
    train = {"epochs": 12, "learning_rate": 0.03, "eval_every": 4, "save_every": 1000}
    for keep in ("best", "last"):
        recipe = make_recipe(
            output_dir=str(tmp_path / keep), heads={"num_heads": 3}, train={**train, "keep": keep}
        )
        report = train_heads(base, counting_rows(20), recipe)
        scored = [line for line in held_out_lines(recipe) if line["step"]]
        lengths = [line["held_out"]["acceptance_length"] for line in scored]
        heads = load_heads(report.heads_folder, base)
        kept[keep] = heads.state_dict(), report.best, lengths
    assert kept["best"][2] == kept["last"][2]
    assert kept["best"][1] == max(kept["best"][2])
    assert kept["last"][1] == kept["last"][2][-1]
    same = all(torch.equal(tensor, kept["last"][0][name])
               for name, tensor in kept["best"][0].items())  # fmt: skip
    assert same == (kept["best"][2][-1] == max(kept["best"][2]))


def test_untrained_heads_are_scored_first_and_never_kept(
    tiny_base, counting_rows, make_recipe, monkeypatch
):
    untrained, kept, original = HeadScores([9.0], [0.0], [0.0], 9.0), [], result.keep
    monkeypatch.setattr(Run, "scorer", lambda *_: lambda: untrained)
    monkeypatch.setattr(
        result, "keep", lambda *given: (kept.append(given[-1]["updates"]), original(*given))
    )
    recipe = make_recipe(train={"epochs": 1, "eval_every": 1000})
    report = train_heads(tiny_base(), counting_rows(20), recipe)
    assert [line["step"] for line in held_out_lines(recipe)] == [0, report.num_updates]
    assert kept == [report.num_updates]


def test_simulated_acceptance_is_replay_on_the_other_half():
    """Perfect first heads and a useless second: every step emits exactly two tokens."""
    lengths = [9, 7, 8, 6]
    ranks, starts = [], np.cumsum([0, *lengths[:-1]])
    for length in lengths:
        rows = np.zeros((length, 2), dtype=np.int16)
        rows[:, 1] = 32767
        rows[-1:, 0] = -1
        rows[-2:, 1] = -1
        ranks.append(rows)
    ranks_PK = np.concatenate(ranks)
    statistics = RankStatistics(ranks_PK, starts, 32)
    by_hand = [replay(CandidateTree.chain(1), half).acceptance_length
               for half in statistics.split(0.5, 0)]  # fmt: skip
    assert simulated_acceptance(ranks_PK, starts, 32) == pytest.approx(sum(by_hand) / 2)
    assert simulated_acceptance(ranks_PK[:9], starts[:1], 32) is None  # nothing to replay on


def test_stretches_of_written_text_begin_where_turns_do(tiny_base, counting_rows):
    rows = counting_rows(3, prompt=3, answer=10)
    rows[1].loss_mask[6:9] = [False] * 3  # a question in between
    items = prepare(rows, 2)
    assert answer_starts(items).tolist() == [0, 10, 13, 17]
    base = tiny_base()
    store = collect_features(base, items, FeatureOptions(10))
    by_size = sorted(items, key=lambda item: -len(item.input_ids))
    scores = evaluate(MedusaHeads.for_base(base, 2), store, 16, answer_starts(by_size))
    assert scores.acceptance_length >= 1


def test_every_result_says_what_it_came_from(tiny_base, counting_rows, make_recipe):
    base, recipe = tiny_base(), make_recipe(seed=5)
    report = train_heads(base, counting_rows(), recipe)
    for path in (report.heads_folder / "provenance.json", RunFolder(recipe).path / "run.json"):
        found = json.loads(path.read_text())
        assert torch.__version__.startswith(found["versions"]["torch"])  # without +cu130, say
        assert found["recipe"]["seed"] == 5
        assert set(found["git"] or {"commit", "changed_files"}) == {"commit", "changed_files"}


def test_git_is_asked_once_a_run(tiny_base, counting_rows, make_recipe, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "medusa_kit.train.run.provenance.git_state", lambda: asked.append(1) or {"commit": "abc"}
    )
    recipe = make_recipe()
    report = train_heads(tiny_base(), counting_rows(), recipe)
    assert report.num_updates > 2 * recipe.train.save_every
    found = json.loads((report.heads_folder / "provenance.json").read_text())
    assert (found["git"], asked) == ({"commit": "abc"}, [1])


def test_git_state_is_the_commit_and_whether_files_differ(tmp_path):
    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip

    assert git_state(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert not state["changed_files"]
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {**state, "changed_files": True}


def test_of_several_processes_only_the_first_prints(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    console.note("a note")
    console.warn("a warning")
    with console.progress("work", 3) as bar:
        bar.advance(3, "done")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    console.note("a note")
    assert capsys.readouterr().err == "a note\n"


@pytest.mark.parametrize(
    ("processes", "sections", "layerwise"),
    [
        (2, {}, True),
        (2, {"joint": {"moves": "full"}}, True),
        (2, {"base": {"model": "owner/model"}}, True),
        (1, {}, False),
        (2, {"joint": {"moves": "qlora"}}, False),
        (2, {"stage": "medusa1"}, False),
        (2, {"base": {"model": "debug-tiny"}}, False),
        (2, {"deepspeed": {"zero_stage": 2}}, False),
        (2, {"deepspeed": {"zero_stage": 3, "enabled": False}}, False),
    ],
)
def test_which_bases_are_loaded_in_pieces(
    make_recipe, monkeypatch, tmp_path, processes, sections, layerwise
):
    (tmp_path / "config.json").write_text("{}")
    whole = {"stage": "medusa2", "base": {"model": str(tmp_path)}, "deepspeed": {"zero_stage": 3}}
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setattr("medusa_kit.base.names._cached", lambda: ["owner/model"])
    assert sharded_base.loads_layerwise(make_recipe(**whole | sections)) == layerwise


def test_each_process_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device("auto") == torch.device("cuda")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device("auto") == torch.device("cuda", 1)
    assert own_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="no GPU of its own: there are 2"):
        own_device("cuda")


def test_versions_name_what_is_installed_and_skip_the_rest(monkeypatch):
    monkeypatch.setattr("medusa_kit.train.run.provenance.PACKAGES", ("torch", "no-such-package"))
    assert set(versions()) == {"medusa_kit", "torch"}


@pytest.mark.parametrize("offline", [False, True])
def test_wandb_gets_every_line_of_the_metrics(
    tiny_base, counting_rows, make_recipe, monkeypatch, offline
):
    started, logged = [], []
    run = SimpleNamespace(log=lambda line, step: logged.append((step, line)))
    fake = SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    recipe = make_recipe(logging={"wandb": True, "offline": offline, "project": "mine"})
    train_heads(tiny_base(), counting_rows(), recipe)
    assert started[0]["project"] == "mine"
    assert started[0]["mode"] == ("offline" if offline else None)
    assert started[0]["config"] == recipe.model_dump()
    lines = (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()
    assert [line for _, line in logged] == [json.loads(line) for line in lines]
    assert [step for step, _ in logged] == [json.loads(line)["step"] for line in lines]


def test_wandb_goes_on_with_its_run(tiny_base, counting_rows, make_recipe, monkeypatch):
    """A run that never saved a checkpoint begins anew, there too."""
    started = []

    def init(**options):
        started.append((options.get("id"), options.get("resume")))
        return SimpleNamespace(log=lambda line, step: None, id=options.get("id") or len(started))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    recipe = make_recipe(logging={"wandb": True})
    for step in (2, 6, 9):
        with monkeypatch.context() as patch:
            stop_before(patch, step)
            with pytest.raises(Crash):
                train_heads(tiny_base(), counting_rows(), recipe)
    train_heads(tiny_base(), counting_rows(), recipe)
    train_heads(tiny_base(), counting_rows(), recipe, fresh=True)
    assert started == [(None, None), (None, None), (2, "allow"), (2, "allow"), (None, None)]


@pytest.mark.parametrize("without", ["wandb", "data"])
def test_what_is_missing_is_told_before_the_base_is_loaded(make_recipe, monkeypatch, without):
    def load(*_, **__):
        raise AssertionError("a base was loaded")

    monkeypatch.setattr(trainer, "load_base", load)
    monkeypatch.setitem(sys.modules, "wandb", None)
    options = {"logging": {"wandb": True}} if without == "wandb" else {}
    recipe = make_recipe(data={"sources": [{"source": "gone.jsonl", "limit": 4}]}, **options)
    with pytest.raises(MedusaKitError, match="gone" if without == "data" else "wandb"):
        trainer.train(recipe)


def test_a_run_begun_with_the_old_split_goes_on_with_it(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path
):
    """Rows come twice; versions before held out some of them and trained on the same ones."""
    rows, train, split = counting_rows() * 2, {"epochs": 1, "eval_every": 1000}, trainer.split
    straight, recipe, new = (
        make_recipe(output_dir=str(tmp_path / name), train=train)
        for name in ("straight", "stopped", "new")
    )

    def old_split(items, fraction, seed, together=None):
        return split(items, fraction, seed, APART)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "split", old_split)
        train_heads(tiny_base(), rows, straight)
        stop_before(patch, 6)
        with pytest.raises(Crash):
            train_heads(tiny_base(), rows, recipe)
    train_heads(tiny_base(), rows, recipe)
    ends = [held_out_lines(one)[-1] for one in (straight, recipe)]
    assert ends[0] == ends[1]
    train_heads(tiny_base(), rows, new)
    assert held_out_lines(new)[-1] != ends[0]


class Crash(Exception):
    pass


def stop_before(monkeypatch, step):
    original = loop.TrainingLoop._update

    def update(self, arguments):
        if self.step == step:
            raise Crash
        original(self, arguments)

    monkeypatch.setattr(loop.TrainingLoop, "_update", update)
