"""What is recorded of a part on a GPU, and what is no figure: another text, steps that were not
captured, a device that was lost."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import commands, exactness, report, workbench
from benchmarks.gpu.baseline import baseline_part
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.decoding import answer_part
from benchmarks.gpu.runner import DeviceLost, Part, run_parts
from benchmarks.gpu.steps import step_part
from benchmarks.gpu.workbench import CAPTURED, COMPILED, LOOP, Cannot, StepMode, Workbench
from medusa_kit.bench.gpu import setup
from medusa_kit.bench.gpu.setup import describe
from medusa_kit.bench.gpu.shapes import (
    LLAMA_8B,
    SMOLLM2_135M,
    tiny,
)
from medusa_kit.bench.oracle import Oracle
from medusa_kit.errors import ConfigError, IncompatibleBaseError, MedusaKitError
from medusa_kit.infer.device.verifier import CapturedVerifier

# torch's own, when dynamo is imported
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CPU = torch.device("cpu")
TINY = tiny(SMOLLM2_135M)


# What must not be recorded as a figure.


@pytest.mark.parametrize("how", ["plain", "static cache, compiled", "without cuDNN"])
def test_the_baseline_of_another_text_is_no_figure(how: str, bench: Workbench) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with commands.on(CPU, dry_run=True):
        assert baseline_part(TINY, how).run(bench)["tokens_per_second"] > 0
        weight = bench.untouched(TINY).output_embedding.weight
        weight[:] = weight.roll(1, 0)
        with pytest.raises(MedusaKitError, match="token 0 of the greedy answer"):
            baseline_part(TINY, how).run(bench)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_a_step_that_was_not_captured_is_no_figure(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedVerifier, "_shape", lambda *_: None)
    with pytest.raises(MedusaKitError, match="not captured, but run by torch"):
        step_part(TINY, 16).run(bench)


def test_an_answer_that_was_not_captured_is_no_figure(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedVerifier, "_shape", lambda *_: None)
    with pytest.raises(MedusaKitError, match=r"not all forwards of the answer were .captured."):
        answer_part(TINY, 0.0, 2.6).run(bench)


def test_the_speed_of_another_text_is_no_figure(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine(TINY, LOOP)
    engine.base.output_embedding.weight[:] = engine.base.output_embedding.weight.roll(1, 0)
    with pytest.raises(MedusaKitError, match="token 0 of the greedy answer"):
        answer_part(TINY, 0.0, 2.6, LOOP).run(bench)


@pytest.mark.parametrize("mode", [CAPTURED, LOOP, COMPILED], ids=str)
def test_tokens_that_are_not_transformers_fail(
    mode: Any, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(self: Oracle, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        return [3] * tokens, 0.0

    monkeypatch.setattr(Oracle, "generate", other)
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    with pytest.raises(MedusaKitError, match="greedy answers are not those of plain transformers"):
        exactness.exactness(mode, torch.float32, bench)


def test_an_engine_that_failed_is_not_tried_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fails(*_: Any) -> None:
        tried.append(1)
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(bench, "engine_around", fails)
    with pytest.raises(RuntimeError, match="no kernel image"):
        bench.engine(TINY, CAPTURED)
    with pytest.raises(MedusaKitError, match=r"no kernel image .as above"):
        bench.engine(TINY, CAPTURED)
    assert len(tried) == 1


def test_an_engine_that_had_no_memory_is_tried_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise IncompatibleBaseError("a tree forward failed") from torch.OutOfMemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr(bench, "engine_around", fails)
        with pytest.raises(IncompatibleBaseError):
            bench.engine(TINY, CAPTURED)
    assert isinstance(bench.engine(TINY, CAPTURED).verifier, CapturedVerifier)


@pytest.mark.parametrize("refused", [True, False], ids=["by the self-check", "by its own word"])
def test_attention_that_computes_something_else_is_no_matter_of_what_is_installed(
    refused: bool, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> None:
        cause = IncompatibleBaseError("logits are off") if refused else None
        raise ConfigError("attention 'triton' cannot be used here") from cause

    monkeypatch.setattr(workbench, "build_engine", build)
    with pytest.raises(ConfigError if refused else Cannot, match="cannot be used here"):
        bench.engine(TINY, StepMode(attention="triton"))


def test_a_model_that_does_not_fit_is_told_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (8 * 10**9, 24 * 10**9))
    with pytest.raises(Cannot, match=r"needs about 17\.7 GB, 8\.0 GB are free"):
        Workbench(torch.device("cuda"), False, lambda name: {}).untouched(LLAMA_8B)


# What asks the device, against a stand-in for it.


class Event:
    """A CUDA event whose next one is 2 ms later."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        return 2.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    properties = SimpleNamespace(
        total_memory=80 * 10**9, major=9, minor=0, multi_processor_count=132, uuid="1-2"
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 3 * 10**9)
    monkeypatch.setattr(setup, "DRIVER", Path("nowhere"))
    return torch.device("cuda", 0)


def test_events_are_milliseconds(device: torch.device) -> None:
    clock, calls = Clock(device), []
    timing = clock.each(lambda: calls.append(1), repeats=3, warm_ups=2)
    assert (timing.median, timing.least, len(calls)) == (2e-3, 2e-3, 5)
    assert clock.together(lambda: None, repeats=4) == 5e-4
    assert clock.once(lambda: "done") == ("done", 2e-3)


def test_the_setup_of_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe(device)
    assert (found["device"], found["memory_gb"]) == ("a GPU", 80.0)
    assert (found["compute_capability"], found["multiprocessors"]) == ("9.0", 132)
    assert (found["driver"], found["state"]) == (None, {})

    def smi(command: list[str], **_: Any) -> SimpleNamespace:
        assert command[-2:] == ["-i", "GPU-1-2"]
        return SimpleNamespace(stdout="580.1, 1980 MHz, 3201 MHz, 0x0, 0 %, 5 MiB, 30, 70 W\n")

    monkeypatch.setattr(setup.subprocess, "run", smi)
    found = describe(device)
    assert found["driver"] == "580.1"
    assert found["state"]["clocks.sm"] == "1980 MHz"


def test_a_record_has_the_peak_of_the_devices_memory(device: torch.device) -> None:
    told = report.Report(device, dry_run=False, path=None)
    part = Part("a", "steps", lambda bench: {"ms": 1.0})
    run_parts([part], Workbench(device, True, told.figures), told, minutes=1)
    assert (told.records["a"].peak_gb, told.records["a"].measured) == (3.0, True)


def test_a_device_that_answers_with_an_error_is_lost(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def loses(bench: Workbench) -> dict[str, Any]:
        monkeypatch.setattr(torch.cuda, "synchronize", fails)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    told = report.Report(device, dry_run=False, path=None)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        run_parts([Part("a", "steps", loses)], Workbench(device, True, told.figures), told, 1)


def test_host_syncs_are_counted_by_torchs_own_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    clock = Clock(CPU)
    assert clock.syncs(lambda: None, 3) is None  # there is nothing to wait for
    clock.on_cuda = True

    def step() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert clock.syncs(step, 4) == 2.0
    assert modes == ["warn", 0]
