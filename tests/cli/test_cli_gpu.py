"""`medusa-kit doctor --gpu`: exit codes, what is printed where, and what is saved."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_kit.bench.gpu.runner import DeviceLost, Part
from medusa_kit.bench.gpu.workbench import Workbench

from medusa_kit.bench.gpu import measure
from medusa_kit.cli import doctor_gpu

Run = Callable[..., tuple[int, str, str]]
DRY = ("doctor", "--gpu", "--dry-run")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parts_are(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    monkeypatch.setattr(measure, "parts", lambda small: list(parts))


def fails(bench: Workbench) -> dict[str, Any]:
    raise ValueError("not here")


def test_without_a_gpu_it_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run("doctor", "--gpu")
    assert (code, out) == (1, "")
    assert "there is no GPU to measure" in err
    assert "hint: --dry-run walks through" in err
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*DRY, "--heads", "x"], "--heads has no meaning with --gpu"),
        ([*DRY, "--data", "x"], "--data has no meaning with --gpu"),
        ([*DRY, "--limit", "3"], "--limit has no meaning with --gpu"),
        ([*DRY, "--tolerance", "0.1"], "--tolerance has no meaning with --gpu"),
        ([*DRY, "--dtype", "float32"], "--dtype has no meaning with --gpu"),
        ([*DRY, "debug-tiny"], "MODEL has no meaning with --gpu"),
        ([*DRY, "--device", "cpu"], "--device has no meaning with --dry-run"),
        ([*DRY, "--continue"], "a dry run is not saved"),
        ([*DRY, "--only", "nothing"], "no part's name contains --only 'nothing'"),
        ([*DRY, "--minutes", "-1"], "Invalid value for '--minutes'"),
        ([*DRY, "--minutes", "nan"], "Invalid value for '--minutes'"),
        ([*DRY, "--minutes", "inf"], "Invalid value for '--minutes'"),
        ([*DRY, "--output", "."], "Invalid value for '--output'"),
        (["doctor", "--dry-run"], "--dry-run has no meaning without --gpu"),
        (["doctor", "--output", "x"], "--output has no meaning without --gpu"),
        (["doctor", "--minutes", "3"], "--minutes has no meaning without --gpu"),
        (["doctor", "--continue"], "--continue has no meaning without --gpu"),
        (["doctor", "--only", "x"], "--only has no meaning without --gpu"),
    ],
    ids=str,
)
def test_usage_errors(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_only_a_gpu_of_this_machine_is_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, _, err = run("doctor", "--gpu", "--device", device)
    assert code == 2
    assert f"--device {device} is no GPU of this machine" in err


def test_a_dry_run_prints_tables_and_saves_nothing_by_itself(run: Run) -> None:
    code, out, err = run(*DRY, "--only", "bandwidth")
    assert code == 0, err
    assert out.startswith("dry run on tiny shapes on the CPU: no figure in here is a measurement")
    assert "Memory, GB/s (no measurement)" in out
    assert "Goals (nothing was measured)" in out
    assert not list(Path().iterdir())


def test_only_takes_parts_by_name_and_the_floor(run: Run) -> None:
    code, out, _ = run(*DRY, "--only", "8b: PROMPT", "--json")
    assert code == 0
    bandwidth, prompt = json.loads(out)["parts"]
    assert (bandwidth["name"], prompt["kind"]) == ("memory bandwidth", "prompts")
    assert prompt["figures"]["times_floor"] > 0


def test_json_on_stdout_is_what_is_saved(run: Run) -> None:
    code, out, _ = run(*DRY, "--only", "bandwidth", "--json", "--output", "report.json")
    assert code == 0
    assert json.loads(out) == json.loads(Path("report.json").read_text())


def test_a_part_that_fails_makes_the_run_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Part("fine", "steps", lambda bench: {"ms": 1.0})
    parts_are(monkeypatch, Part("broken", "steps", fails), fine)
    code, out, err = run(*DRY)
    assert code == 1
    assert "ValueError: not here" in out
    assert "error: 1 part failed" in err


def test_a_report_that_cannot_be_saved_is_printed_and_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills(bench: Workbench) -> dict[str, Any]:
        Path("r.json").unlink()
        Path("r.json").mkdir()
        return {"ms": 1.5}

    parts_are(monkeypatch, Part("one", "steps", fills))
    code, out, err = run(*DRY, "--output", "r.json")
    assert code == 1
    assert "1.500" in out
    assert "error: the report cannot be saved as r.json" in err
    assert "saved as r.json" not in err.replace("cannot be saved as", "")


def test_loading_counts_among_the_minutes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(doctor_gpu, "_device", lambda asked: time.sleep(0.02))
    monkeypatch.setattr(measure, "measure", lambda *told: seen.append(told) or [].pop())
    with pytest.raises(IndexError):
        run(*DRY)
    ((_, _, _, minutes, _, _),) = seen
    assert 8 < minutes < 9 - 0.02 / 60


def test_continue_measures_what_was_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    parts_are(monkeypatch, Part("one", "steps", lambda bench: {"ms": 1.0}))
    assert run(*DRY, "--output", "r.json", "--minutes", "0")[0] == 0
    assert json.loads(Path("r.json").read_text())["parts"][0]["status"] == "left out"
    assert run(*DRY, "--output", "r.json", "--continue")[0] == 0
    parts_are(monkeypatch, Part("one", "steps", fails))  # is not run again
    code, out, _ = run(*DRY, "--output", "r.json", "--continue", "--json")
    assert (code, json.loads(out)["parts"][0]["figures"]) == (0, {"ms": 1.0})


def test_a_lost_device_hands_over_to_a_new_process(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise DeviceLost("CUDA error")

    def took_over(program: str, command: list[str]) -> None:
        commands.append(command)
        raise SystemExit(0)

    commands: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(measure, "measure", lost)
    monkeypatch.setattr(os, "execv", took_over)
    _, _, err = run("doctor", "--gpu", "--device", "cuda:0", "--only", "8B", "--json")
    (command,) = commands
    assert command[:6] == [sys.executable, "-m", "medusa_kit", "doctor", "--gpu", "--continue"]
    assert command[6:9] == ["--output", "gpu_report.json", "--minutes"]
    assert command[10:] == ["--device", "cuda:0", "--json", "--only", "8B"]
    assert "CUDA error: the device no longer answers" in err
