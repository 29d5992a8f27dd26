"""`medusa-kit doctor --gpu`: exit codes, what is printed where, and what is checked."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from medusa_kit.bench.gpu import check
from medusa_kit.bench.gpu.shapes import LLAMA_1B, LLAMA_8B
from medusa_kit.errors import DeviceMemoryError
from medusa_kit.infer.device.verifier import CapturedVerifier

Run = Callable[..., tuple[int, str, str]]
DRY = ("doctor", "--gpu", "--dry-run")


def test_without_a_gpu_it_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run("doctor", "--gpu")
    assert (code, out) == (1, "")
    assert "there is no GPU to check" in err
    assert "hint: `medusa-kit doctor --gpu --dry-run` walks through it" in err


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
        (["doctor", "--dry-run"], "--dry-run has no meaning without --gpu"),
    ],
    ids=str,
)
def test_usage_errors(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_only_a_gpu_of_this_machine_is_checked(
    run: Run, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, _, err = run("doctor", "--gpu", "--device", device)
    assert code == 2
    assert f"--device {device} is no GPU of this machine" in err


def test_a_dry_run_shows_setup_and_steps(run: Run) -> None:
    code, out, err = run(*DRY)
    assert code == 0, err
    assert out.startswith("dry run on a tiny shape on the CPU: no figure in here is a measurement")
    for said in (torch.__version__, "self-check", "torch, fixed shapes (sdpa)", "no measurement",
                 "random weights of a tiny Llama", "not on a CPU"):  # fmt: skip
        assert said in out, said
    assert "Llama-3.1" not in out + err


def test_json_says_what_ran(run: Run) -> None:
    code, out, err = run(*DRY, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["dry_run"]
    assert found["captured"]
    assert [one["nodes"] for one in found["steps"]] == [1, 16, 64]
    assert all(one["captured"] and one["ms"] >= one["least_ms"] > 0 for one in found["steps"])
    assert found["self_check"]["rounding_tolerance"] > 0
    assert "sdpa" in found["setup"]


def test_a_step_that_is_not_captured_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CapturedVerifier._shape

    def small(self: CapturedVerifier, cache: Any, nodes: Any, rows: Any) -> Any:
        return None if sum(nodes.counts) == 64 else plain(self, cache, nodes, rows)

    monkeypatch.setattr(CapturedVerifier, "_shape", small)
    found = json.loads(run(*DRY, "--json")[1])
    assert [one["captured"] for one in found["steps"]] == [True, True, False]


def test_the_largest_model_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    for gb, shape in ((80, LLAMA_8B), (24, LLAMA_8B), (16, LLAMA_1B)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, gb=gb: (gb * 10**9, 0))
        assert check.largest_that_fits(device) == shape
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**8, 0))
    with pytest.raises(DeviceMemoryError, match=r"0\.1 GB of the GPU's memory are free"):
        check.largest_that_fits(device)
