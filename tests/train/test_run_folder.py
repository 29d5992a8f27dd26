"""One training at a time in a folder, and metrics of one run, in order, each line once."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import filelock._api
import pytest
import torch
import yaml
from support.clocks import own_time

from medusa_kit import process_lock
from medusa_kit.errors import ConfigError, DataError
from medusa_kit.train import loop
from medusa_kit.train.run import random_state
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.run.lock import only_training_in
from medusa_kit.train.trainer import train, train_heads

pytestmark = pytest.mark.usefixtures("often")

HOLD = """
import sys
from pathlib import Path
from medusa_kit.train.run.lock import only_training_in
with only_training_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


class Crash(Exception):
    pass


def in_the_middle(monkeypatch, step, action):
    """Call `action` once, before update `step`, counted from 0."""
    original, called = loop.TrainingLoop._update, []

    def update(self, arguments):
        if self.step == step and not called:
            called.append(True)
            action()
        original(self, arguments)

    monkeypatch.setattr(loop.TrainingLoop, "_update", update)


def crash():
    raise Crash


def lines_of(recipe):
    return (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_training_in_the_folder_is_refused_and_changes_nothing(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path
):
    base, recipe, refused = tiny_base(), make_recipe(), []
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    read = recipe.data.model_copy(update={"sources": [str(tmp_path / "rows.jsonl")]})
    other = make_recipe(train={"learning_rate": 0.5}).model_copy(update={"data": read})

    def again():
        before = contents(tmp_path / "run")
        for start in (
            lambda: train_heads(base, counting_rows(), recipe),
            lambda: train_heads(base, counting_rows(), other),
            lambda: train(other, fresh=True),
        ):
            with pytest.raises(ConfigError, match="in use by another training") as caught:
                start()
            refused.append(caught.value.message)
        assert contents(tmp_path / "run") == before

    monkeypatch.setattr(process_lock, "PATIENCE", 0)
    in_the_middle(monkeypatch, 6, again)
    train_heads(base, counting_rows(), recipe)
    assert len(refused) == 3
    assert all(f"process {os.getpid()} on {socket.gethostname()}" in one for one in refused)
    steps = [json.loads(line)["step"] for line in lines_of(recipe)]
    assert steps == sorted(steps)
    assert (tmp_path / "run/run.json").is_file()
    assert not (tmp_path / "run/.training.json").exists()


@pytest.mark.skipif(os.name != "posix", reason="kills by a signal")
def test_the_lock_dies_with_its_process(tiny_base, counting_rows, make_recipe, tmp_path):
    base, recipe = tiny_base(), make_recipe()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on "):
            train_heads(base, counting_rows(), recipe)
        holder.send_signal(signal.SIGKILL)
    train_heads(base, counting_rows(), recipe)
    assert (tmp_path / "run/run.json").is_file()


def test_a_lock_that_is_about_to_be_free_is_waited_for(monkeypatch, tmp_path):
    """A killed process holds its lock for some more milliseconds."""
    with contextlib.ExitStack() as dying:
        dying.enter_context(only_training_in(tmp_path))
        with monkeypatch.context() as patch:
            own_time(patch, filelock._api, sleep=lambda _: dying.close())
            with only_training_in(tmp_path):
                holder = json.loads((tmp_path / ".training.json").read_text())
    assert holder["pid"] == os.getpid()


def test_a_lock_is_no_run(tiny_base, make_recipe, tmp_path):
    """A run that wrote nothing leaves no folder, but an existing one stays."""
    recipe = make_recipe()
    with pytest.raises(DataError):
        train_heads(tiny_base(), [], recipe)
    assert not (tmp_path / "run").exists()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    with pytest.raises(DataError):
        train_heads(tiny_base(), [], recipe)
    assert (tmp_path / "disk").is_dir()


@pytest.mark.parametrize("other", ["the same", "another", "gone"])
def test_a_run_killed_before_its_first_checkpoint_leaves_no_metrics(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path, other
):
    """It starts at update 0 again. Where it is no longer this recipe's it is not lost unsaid."""
    base, train_options = tiny_base(), {"save_every": 100, "log_every": 1}
    with monkeypatch.context() as patch:
        in_the_middle(patch, 6, crash)
        with pytest.raises(Crash):
            train_heads(base, counting_rows(), make_recipe(train=train_options))
    (tmp_path / "run/bad_update.pt").write_bytes(b"of the run before")
    options = {**train_options, "learning_rate": 0.02 if other == "another" else 0.01}
    recipe = make_recipe(train=options)
    if other == "gone":
        (tmp_path / "run/recipe.yaml").unlink()
    if other != "the same":
        before = contents(tmp_path / "run")
        with pytest.raises(ConfigError, match="holds a run of another recipe") as caught:
            train_heads(base, counting_rows(), recipe)
        assert "--fresh" in caught.value.hint
        assert contents(tmp_path / "run") == before
    train_heads(base, counting_rows(), recipe, fresh=other != "the same")
    straight = make_recipe(output_dir=str(tmp_path / "straight"), train=options)
    train_heads(base, counting_rows(), straight)
    assert without_seconds(recipe) == without_seconds(straight)
    assert not (tmp_path / "run/bad_update.pt").exists()


def test_a_run_that_stopped_in_its_first_update_takes_another_recipe(
    tiny_base, counting_rows, make_recipe, monkeypatch
):
    """As one whose memory was too small, and is to begin with smaller batches."""
    with monkeypatch.context() as patch:
        in_the_middle(patch, 0, crash)
        with pytest.raises(Crash):
            train_heads(tiny_base(), counting_rows(), make_recipe())
    smaller = make_recipe(train={"micro_batch_positions": 16})
    assert lines_of(smaller)
    train_heads(tiny_base(), counting_rows(), smaller)


@pytest.mark.parametrize("of", ["another run", "the run, without a line"])
def test_metrics_of_something_else_are_told_before_a_run_goes_on(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path, of
):
    base, recipe = tiny_base(), make_recipe(train={"log_every": 1})
    other = make_recipe(seed=5, output_dir=str(tmp_path / "other"))
    with monkeypatch.context() as patch:
        in_the_middle(patch, 6, crash)
        with pytest.raises(Crash):
            train_heads(base, counting_rows(), recipe)
    path = tmp_path / "run/metrics.jsonl"
    own = path.read_text()
    if of == "another run":
        train_heads(base, counting_rows(), other)
        path.write_text((tmp_path / "other/metrics.jsonl").read_text())
    else:
        path.write_text("".join(own.splitlines(keepends=True)[1:]))
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"metrics.jsonl does not begin with the \d lines"):
        train_heads(base, counting_rows(), recipe)
    assert contents(tmp_path / "run") == before
    path.write_text(own)
    train_heads(base, counting_rows(), recipe)


def without_seconds(recipe):
    lines = [json.loads(line) for line in lines_of(recipe)]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_metrics_after_the_last_checkpoint_are_not_written_twice(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path
):
    """Ctrl-C in the last update saves; what is judged after that is judged again."""
    base = tiny_base()
    straight = make_recipe(output_dir=str(tmp_path / "straight"))
    last = train_heads(base, counting_rows(), straight).num_updates - 1
    recipe = make_recipe()
    with monkeypatch.context() as patch:
        in_the_middle(patch, last, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train_heads(base, counting_rows(), recipe)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", lambda *_: crash())
        with pytest.raises(Crash):
            train_heads(base, counting_rows(), recipe)
    train_heads(base, counting_rows(), recipe)
    assert without_seconds(recipe) == without_seconds(straight)


def test_a_checkpoint_without_the_number_of_lines_is_taken_up(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path
):
    """As an older version wrote it: lines of later updates are removed."""
    base, recipe = tiny_base(), make_recipe()
    with monkeypatch.context() as patch:
        in_the_middle(patch, 7, crash)
        with pytest.raises(Crash):
            train_heads(base, counting_rows(), recipe)
    (path,) = (tmp_path / "run/checkpoint").glob("*/progress.json")
    progress = json.loads(path.read_text())
    for name in ("metric_lines", "metrics"):
        del progress[name]
    path.write_text(json.dumps(progress))
    train_heads(base, counting_rows(), recipe)
    steps = [json.loads(line)["step"] for line in lines_of(recipe)]
    assert steps == sorted(steps)
    assert steps.count(6) == 1


def test_a_run_of_an_earlier_version_goes_on_unless_it_used_what_is_gone(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path
):
    """Earlier versions wrote keys into the run's recipe that are no longer there."""
    base, recipe = tiny_base(), make_recipe()
    with monkeypatch.context() as patch:
        in_the_middle(patch, 6, crash)
        with pytest.raises(Crash):
            train_heads(base, counting_rows(), recipe)
    path = tmp_path / "run/recipe.yaml"
    now = yaml.safe_load(path.read_text())

    def written_with(keys):
        path.write_text(yaml.safe_dump({**now, "train": {**now["train"], **keys}}))

    written_with({"fused_loss": "auto", "head_weights": "learned"})
    with pytest.raises(ConfigError, match=r"head_weights = 'learned' is no longer there") as caught:
        train_heads(base, counting_rows(), recipe)
    assert "--fresh" in caught.value.hint
    written_with({"fused_loss": "auto", "head_weights": "decay"})
    train_heads(base, counting_rows(), recipe)
    straight = make_recipe(output_dir=str(tmp_path / "straight"))
    train_heads(base, counting_rows(), straight)
    assert without_seconds(recipe) == without_seconds(straight)


def test_a_linked_checkpoint_folder_is_emptied_and_stays(
    tiny_base, counting_rows, make_recipe, monkeypatch, tmp_path
):
    base, recipe = tiny_base(), make_recipe()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint").symlink_to("../disk")
    with monkeypatch.context() as patch:
        in_the_middle(patch, 6, crash)
        with pytest.raises(Crash):
            train_heads(base, counting_rows(), recipe)
    assert len(list((tmp_path / "disk").iterdir())) == 1
    folder = RunFolder(recipe)
    folder.open(fresh=True)
    assert folder.load() is None
    folder.begin()
    assert RunFolder(recipe).load() is None
    train_heads(base, counting_rows(), recipe)
    assert (tmp_path / "run/checkpoint").is_symlink()
    assert list((tmp_path / "disk").iterdir()) == []


# What dropout draws from.


class Gpus:
    """As many as `count`, as far as random states go."""

    def __init__(self, monkeypatch, count):
        self.states = [torch.tensor([index], dtype=torch.uint8) for index in range(count)]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda all_: all(
            self.set(state, index) for index, state in enumerate(all_)))  # fmt: skip

    def set(self, state, device):
        self.states[device] = state
        return True


def test_a_resumed_run_has_the_random_states_of_every_device(
    tiny_base, counting_rows, make_recipe, monkeypatch
):
    base, recipe, gpus = tiny_base(), make_recipe(), Gpus(monkeypatch, 2)
    saved = []

    def save_then_draw(self):
        original(self)
        saved.append((torch.get_rng_state(), list(gpus.states)))
        torch.rand(3)
        gpus.states = [state + 7 for state in gpus.states]

    original = loop.TrainingLoop.save
    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingLoop, "save", save_then_draw)
        in_the_middle(patch, 6, crash)
        with pytest.raises(Crash):
            train_heads(base, counting_rows(), recipe)
    found = []
    in_the_middle(monkeypatch, 4, lambda: found.append((torch.get_rng_state(), gpus.states)))
    train_heads(base, counting_rows(), recipe)
    ((cpu, states),) = saved
    assert torch.equal(found[0][0], cpu)
    assert [state.item() for state in found[0][1]] == [state.item() for state in states] == [0, 1]


@pytest.mark.parametrize("then", [0, 1, 3])
def test_another_number_of_gpus_is_told(monkeypatch, tmp_path, capsys, then):
    path = tmp_path / "random-0.pt"
    Gpus(monkeypatch, 2)
    random_state.save_random_state(path)
    gpus = Gpus(monkeypatch, then)
    gpus.states = [state + 7 for state in gpus.states]
    random_state.load_random_state(path)
    assert [state.item() for state in gpus.states] == [0, 1, 9][:then]
    assert f"random states of 2 GPUs, this process sees {then}" in capsys.readouterr().err


def test_the_random_state_of_an_older_version_is_read(tmp_path, capsys):
    path: Path = tmp_path / "random-0.pt"
    torch.save(torch.get_rng_state(), path)
    expected = torch.rand(3)
    random_state.load_random_state(path)
    assert torch.equal(torch.rand(3), expected)
    assert capsys.readouterr().err == ""
