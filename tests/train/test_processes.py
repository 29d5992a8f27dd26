"""Several processes: runs that must agree form a class, and a run that loses a process recovers."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import make_base, run
from support.samples import ALL
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.errors import ConfigError
from medusa_kit.train.processes import launch

ROOT = Path(__file__).parent.parent.parent
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
# Losses are sums of the same float32 numbers in other orders.
TOLERANCE = 2e-5
ROUGH = 2e-3  # a base in 16 bits, whose batches differ
PLAIN = {"deepspeed": {"enabled": False}}


def zero(stage):
    return {"deepspeed": {"enabled": True, "zero_stage": stage, "persistence_threshold": 0}}


def cut(positions, accumulation=1, **more):
    train = {"micro_batch_positions": positions, "accumulation": accumulation, **more}
    return {"train": train}


# The stages of ZeRO that each runs with, unless all do (make test CASES=all).
# Stage 2 runs below with an average, stage 3 also with bases in pieces.
ZERO = {"medusa1": (1,), "recurrent": (3,), "lora": (0,), "full": (1,)}
STAGES = {
    "medusa1": {"stage": "medusa1", "heads": {"num_heads": 2, "projection": "own"}},
    "recurrent": {"stage": "medusa1", "heads": {"num_heads": 2, "kind": "recurrent"}},
    "lora": {"stage": "medusa2", "heads": {"num_heads": 2, "kind": "hydra"},
             "joint": {"moves": "lora", "distill_share": 0.5, "lora": {"rank": 4}}},
    "full": {"stage": "medusa2",
             "heads": {"num_heads": 2, "projection": "reduced", "reduced_size": 20},
             "joint": {"moves": "full", "distill_share": 0.5, "gradient_checkpointing": True}},
}  # fmt: skip


def run_together(folder, runs, processes):
    """Every run in turn, in so many processes; what the first of them found."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(processes):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port),
            "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__).parent / "processes.py"), str(folder)]
        workers.append(subprocess.Popen([*command, json.dumps(runs)], env=environment,
                                        stderr=subprocess.PIPE, text=True))  # fmt: skip
    errors = [worker.communicate(timeout=400)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * processes, "\n".join(
        error[-6000:] for error in errors
    )
    return json.loads((folder / "found.json").read_text())


def save_base(folder):
    make_base().model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@needs_deepspeed
def test_runs_that_must_agree_do(tmp_path):
    """Micro-batch × accumulation × processes × ZeRO stage: the same losses, the same heads.

    Shards are real: with persistence_threshold 0 stage 3 keeps no weight whole. "in pieces": the
    same base, read from a folder, is never whole in any process.
    """
    base = {"base": {"model": str(save_base(tmp_path / "base"))}}
    alone, together = {}, {}
    for name, stage in STAGES.items():
        alone[f"{name}/one"] = {**stage, **PLAIN, **cut(32)}
        alone[f"{name}/accumulated"] = {**stage, **PLAIN, **cut(8, accumulation=4)}
        together[f"{name}/plain"] = {**stage, **PLAIN, **cut(16)}
        for number in range(4) if ALL else ZERO[name]:
            accumulation = 2 if number == 2 else 1
            together[f"{name}/zero {number}"] = {
                **stage, **zero(number), **cut(16 // accumulation, accumulation)
            }  # fmt: skip
        if stage["stage"] == "medusa2":
            together[f"{name}/in pieces"] = {**stage, **zero(3), **cut(16), **base}
    for name, numbers in (("medusa1", (2,)), ("lora", (1,))):
        stage, average = STAGES[name], {"average": 0.5}
        alone[f"{name} averaged/one"] = {**stage, **PLAIN, **cut(32, **average)}
        together[f"{name} averaged/plain"] = {**stage, **PLAIN, **cut(16, **average)}
        for number in numbers:
            together[f"{name} averaged/zero {number}"] = {
                **stage, **zero(number), **cut(8, 2, **average)
            }  # fmt: skip
    low = {"base": {"model": "debug-tiny", "dtype": "bfloat16"}}
    layerwise = {"base": {**base["base"], "dtype": "bfloat16"}}
    alone["low/one"] = {**STAGES["lora"], **PLAIN, **cut(32), **low}
    together["low/zero 1"] = {**STAGES["lora"], **zero(1), **cut(16), **low}
    together["low/in pieces"] = {**STAGES["lora"], **zero(3), **cut(16), **layerwise}
    alone["live/one"] = {**STAGES["medusa1"], **PLAIN, **cut(32, features="live")}
    together["live/zero 1"] = {**STAGES["medusa1"], **zero(1), **cut(16, features="live")}
    (tmp_path / "alone").mkdir()
    found = {name: run(tmp_path / "alone" / name, sections) for name, sections in alone.items()}
    found |= run_together(tmp_path / "together", together, 2)
    for name in found:
        reference = found[f"{name.split('/')[0]}/one"]
        rough = name.startswith("low")
        losses = pytest.approx(reference["losses"], rel=ROUGH if rough else TOLERANCE)
        assert found[name]["losses"] == losses, name
        weights = pytest.approx(reference["weights"], rel=3e-2 if rough else 1e-3)
        assert found[name]["weights"] == weights, name
        assert found[name]["base"] == [f"torch.{'bfloat16' if rough else 'float32'}"], name
        assert found[name]["base was whole"] == (not name.endswith("in pieces")), name
    for name in ("medusa1", "lora"):
        plain, average = (found[f"{name}{kind}/one"] for kind in ("", " averaged"))
        assert average["losses"] == plain["losses"]
        assert average["weights"] != pytest.approx(plain["weights"], rel=1e-2)
    for name in ("medusa1", "recurrent", "lora", "full", "live"):
        losses = found[f"{name}/one"]["losses"]
        assert len(losses) >= 5
        assert losses[-1] < losses[0]


def debug_command(folder, *overrides):
    return [
        "train", str(ROOT / "recipes/debug.yaml"), f"output_dir={folder}", "train.epochs=12",
        "train.save_every=5", "train.log_every=1", "train.keep=last", "deepspeed.enabled=false",
        *overrides,
    ]  # fmt: skip


@pytest.fixture
def in_two_processes(monkeypatch):
    """Runs a command to its end; its launcher is this process, which has imported torch already."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", launch.SECONDS_TO_SAVE)
    monkeypatch.chdir(ROOT)
    return lambda arguments: launch.launch(arguments, 2)


def start(arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "medusa_kit", *arguments], env=environment, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "heads" / "heads.safetensors")


def worker_pids(parent):
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True,
                             text=True, check=False)  # fmt: skip
    return [int(pid) for pid in listing.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="asks ps for the worker's process")
def test_a_killed_process_ends_the_others_and_the_run_goes_on_where_it_was(
    tmp_path, in_two_processes, capfd
):
    code = in_two_processes(debug_command(tmp_path / "straight"))
    assert code == 0, capfd.readouterr().err[-2000:]
    assert json.loads((tmp_path / "straight/run.json").read_text())["processes"] == 2

    folder = tmp_path / "killed"
    run = start([*debug_command(folder), "--nproc", "2"])
    deadline = time.monotonic() + 200
    while not list(folder.glob("checkpoint/step-*/progress.json")):
        assert run.poll() is None, run.communicate()[1][-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(worker_pids(run.pid)[-1], signal.SIGKILL)
    said = run.communicate(timeout=60)[1]  # the others end within a minute
    assert run.returncode == 1
    assert "killed by signal 9; the others are stopped" in said
    assert not (folder / "run.json").exists()

    code = in_two_processes(debug_command(folder))
    said = capfd.readouterr().err
    assert code == 0, said[-2000:]
    assert "continuing from update" in said
    ours, theirs = weights(folder), weights(tmp_path / "straight")
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    steps = [
        [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder, tmp_path / "straight")
    ]
    assert steps[0] == steps[1]


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Makes this shell script what each process runs."""

    def set_script(script):
        path = tmp_path / "worker"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "20")  # put back as they were
    return set_script


def test_workers_share_the_exit_code_of_the_first_that_fails(worker, tmp_path, capfd):
    worker(f'echo $$ > {tmp_path}/$RANK; [ "$RANK $*" = "1 -m medusa_kit train x" ] && exit 2\n'
           "exec sleep 30")  # fmt: skip
    handler = signal.getsignal(signal.SIGTERM)
    assert launch.launch(["train", "x"], 2) == 2
    assert signal.getsignal(signal.SIGTERM) is handler
    assert_ended(int((tmp_path / "0").read_text()))
    said = capfd.readouterr().err
    assert said == "warning: process 1 of 2 ended with 2; the others are stopped\n"


def assert_ended(pid):
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_launcher_stops_the_workers_in_their_own_time(
    worker, tmp_path, monkeypatch, number, capfd
):
    """Each needs a moment to save."""
    worker(f"""trap 'sleep 0.3; echo > {tmp_path}/saved-$RANK; exit 130' {number.value}
             echo $$ > {tmp_path}/$RANK
             while :; do sleep 0.05; done""")
    look = LocalElasticAgent._monitor_workers

    def look_and_stop(agent, group):
        if (tmp_path / "0").exists() and (tmp_path / "1").exists():
            os.kill(os.getpid(), number)
        return look(agent, group)

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", look_and_stop)
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            launch.launch(["train"], 2)
    else:
        assert launch.launch(["train"], 2) == 128 + 15
        assert "warning: stopped by SIGTERM, with the 2 processes" in capfd.readouterr().err
    for rank in ("0", "1"):
        assert_ended(int((tmp_path / rank).read_text()))
        assert (tmp_path / f"saved-{rank}").exists()


def has_ended(pid: int) -> bool:
    """Whether nothing is left of a process but, at most, its entry in the table of processes."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of that")
def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
    """While they start, too, when they would wait for each other without a limit of ours."""
    run = start([*debug_command(tmp_path / "run", "train.epochs=500"), "--nproc", "2"])
    deadline = time.monotonic() + 100
    while len(pids := worker_pids(run.pid)) < 2:
        assert run.poll() is None, run.communicate()[1][-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while not all(b"\0train\0" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        time.sleep(0.01)
    time.sleep(1.5)  # they have asked the kernel by now, and import torch
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=60)  # its pipes are theirs, too, and close when the last has ended
    for pid in pids:
        while not has_ended(pid):  # a process closes its files a moment before it has ended
            assert time.monotonic() < deadline + 60
            time.sleep(0.01)


def test_nproc_inside_another_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="started 4 processes"):
        launch.launch(["train", "x"], 2)
