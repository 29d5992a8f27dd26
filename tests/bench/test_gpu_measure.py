"""`doctor --gpu` on the CPU: a dry run walks through every part, and parts do what they say."""

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu.measure import measure, parts
from support.small_engines import build_engine

from benchmarks.gpu.decoding import answer_part
from benchmarks.gpu.known_text import KnownText, share_for, tree_of
from benchmarks.gpu.report import NO_MEASUREMENT, describe
from benchmarks.gpu.runner import DeviceLost, Part, run_parts
from benchmarks.gpu.steps import step_part
from benchmarks.gpu.tables import TABLES, print_report
from benchmarks.gpu.workbench import CAPTURED, COMPILED, LOOP, Cannot, StepMode, Workbench
from medusa_kit import console
from medusa_kit.base import fingerprint
from medusa_kit.bench.gpu import exactness, report, workbench
from medusa_kit.bench.gpu.clock import Clock
from medusa_kit.bench.gpu.shapes import (
    EXACTNESS,
    LLAMA_1B,
    LLAMA_8B,
    SMOLLM2_135M,
    random_base,
    successors,
    tiny,
)
from medusa_kit.bench.oracle import Oracle
from medusa_kit.errors import ConfigError, IncompatibleBaseError, MedusaKitError
from medusa_kit.infer.attention import triton_backend
from medusa_kit.infer.cpu import mkl_linear as packed_linear
from medusa_kit.infer.cuda_graph.verifier import CapturedVerifier

# torch's own, when dynamo is imported
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CPU = torch.device("cpu")
TINY = tiny(SMOLLM2_135M)
# Packages that the machine of a GPU may lack: a borrowed one has no network to get them.
NOT_NEEDED = ("xxhash", "psutil", "gguf", "datasets", "deepspeed", "wandb", "peft", "matplotlib",
              "flash_attn", "liger_kernel", "vllm")  # fmt: skip


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON report of a whole dry run."""
    path = tmp_path_factory.mktemp("gpu") / "report.json"
    with pytest.MonkeyPatch.context() as patch:  # an interpreter has other tests, and no bfloat16
        patch.setattr(triton_backend, "interpreting", lambda: False)
        for name in NOT_NEEDED:
            patch.setitem(sys.modules, name, None)
        measure(CPU, dry_run=True, path=path)
    return json.loads(path.read_text())


@pytest.fixture
def bench() -> Workbench:
    return Workbench(CPU, True, lambda name: {})


# The dry run.


def test_a_dry_run_walks_through_every_part(walked: dict[str, Any]) -> None:
    found = {part["name"]: part for part in walked["parts"]}
    assert list(found) == [part.name for part in parts(small=False)]
    assert {part["kind"] for part in walked["parts"]} == set(TABLES)
    without = {name for name, part in found.items() if part["status"] != "done"}
    assert all(found[name]["status"] == "cannot" for name in without), without
    assert all("triton" in name or "vLLM" in name for name in without)
    assert [shape["hidden_size"] for shape in walked["setup"]["shapes"]] == [32, 32, 32]
    assert walked["finished"]
    assert "running" not in walked


def test_nothing_of_a_dry_run_counts_as_measured(walked: dict[str, Any]) -> None:
    assert walked["dry_run"]
    assert walked["note"] == NO_MEASUREMENT
    assert not any(part["measured"] for part in walked["parts"])
    assert [goal["met"] for goal in walked["goals"]] == [None] * 4


def test_goals_name_parts_and_figures_that_there_are(walked: dict[str, Any]) -> None:
    found = {part["name"]: part["figures"] for part in walked["parts"]}
    for goal in walked["goals"]:
        assert goal["part"] in found
        figures = found[goal["part"]]
        if "host syncs" in goal["goal"]:  # which a CPU has none of
            assert goal["figure"] is figures["host_syncs"] is None
        else:
            name = "against_transformers" if "transformers" in goal["goal"] else "times_floor"
            assert goal["figure"] == figures[name] > 0


def test_every_way_ran_as_it_is_called(walked: dict[str, Any]) -> None:
    done = [part for part in walked["parts"] if part["status"] == "done"]
    for part in (part for part in done if "medusa-kit," in part["name"]):
        captured = "fixed shapes" in part["figures"]["run_by"]
        assert captured == ("(captured)" in part["name"]) == ("(loop)" not in part["name"])
    for part in (part for part in done if part["kind"] == "steps"):
        run_by = part["figures"]["run_by"]
        assert ("fixed shapes" in run_by) == ("captured" in part["name"])
        assert run_by.startswith("torch.compile") == ("compiled" in part["name"])
        assert ("device_ms" in part["figures"]) == ("captured" in part["name"])
    for part in (part for part in walked["parts"] if part["kind"] == "exactness"):
        assert part["figures"]["identical"] == part["figures"]["answers"] == 16
        assert part["figures"]["acceptance_length"] > 1.1


def test_what_takes_long_or_leaves_a_trace_comes_after_the_rest() -> None:
    """Compiling takes minutes of the nine; a profiler may slow down what is timed later."""
    names = [part.name for part in parts(small=False)]
    late = [one for one in names if "compiled" in one or "kernels" in one or "vLLM" in one]
    assert names[-len(late) :] == late
    assert len(late) < len(names) / 5
    first = next(one for one in names if "Llama-3.1-8B" in one)
    assert names.index(first) < 20


def test_the_setup_names_device_versions_and_date() -> None:
    setup = describe(CPU)
    assert torch.__version__.startswith(str(setup["torch"]))  # without +cu130, say
    assert {"date", "device", "cuda", "triton", "transformers", "medusa_kit"} <= set(setup)


@pytest.mark.parametrize("module", [fingerprint, packed_linear], ids=lambda one: one.__name__)
def test_modules_load_without_what_is_not_needed(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NOT_NEEDED:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("loaded_again", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_again", again)  # dataclasses look for it
    spec.loader.exec_module(again)


# Random weights and the drafter that knows their text.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chained_weights_say_one_token_after_each(dtype: torch.dtype) -> None:
    base, next_V = random_base(TINY, CPU, dtype), successors(TINY.vocab_size, CPU)
    answer, _ = Oracle(base).generate([5, 6, 7], 40)
    assert answer[0] == next_V[7]
    assert [int(next_V[token]) for token in answer[:-1]] == answer[1:]
    assert len(set(answer)) == 40


def test_wide_weights_say_many_things() -> None:
    answer, _ = Oracle(random_base(EXACTNESS, CPU, torch.float32, wide=True)).generate([5, 6], 60)
    assert len(set(answer)) > 20


@pytest.mark.parametrize("wanted", [1.0, 2.6, 5.0])
def test_acceptance_is_what_was_asked_for(wanted: float) -> None:
    base, next_V = random_base(TINY, CPU, torch.float32), successors(TINY.vocab_size, CPU)
    engine = build_engine(base, attention="sdpa", fixed_shapes="always", keep_layers=True)
    engine.heads = KnownText.of(base, next_V, share_for(wanted))
    engine.use_tree(tree_of(16))
    result = engine.generate([5, 6, 7], max_new_tokens=TINY.vocab_size, drafter="medusa")
    assert result.stats.acceptance_length == pytest.approx(wanted, abs=0.3)
    assert "fixed shapes" in result.stats.steps_run_by


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_trees_have_the_size_asked_for(size: int) -> None:
    tree = tree_of(size)
    assert tree.num_nodes == size
    assert tree.depth == min(4, size - 1)


def test_weights_that_a_step_reads_are_counted_from_the_shape() -> None:
    model = random_base(TINY, CPU, torch.float32).model
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert TINY.linear_weights == sum(linear)
    assert [round(shape.linear_weights / 1e6) for shape in (SMOLLM2_135M, LLAMA_1B, LLAMA_8B)] == [
        134, 1236, 7505,
    ]  # fmt: skip


def test_no_figure_is_cut_off_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    told = report.Report(CPU, dry_run=False, path=None)
    longest = {part.kind: part for part in sorted(parts(small=False), key=lambda p: len(p.name))}
    for kind, (_, columns) in TABLES.items():
        part = longest[kind]
        figures = {name: "triton" if digits is None else 987.6543 for _, name, digits in columns}
        told.add(report.Record(part.name, kind, part.shape, "done", True, figures, peak_gb=61.234))
    why = "attention 'triton' was asked for, but cannot be used here: no compiler was found"
    told.add(report.Record("without", "steps", "", "cannot", True, why=why))
    print_report(told)
    out = capsys.readouterr().out
    assert "…" not in out
    digits = [one for _, columns in TABLES.values() for _, _, one in columns]
    for count in (0, 1, 2, 3):
        assert out.count(f" {987.6543:.{count}f} ") == digits.count(count), count
    assert out.count(" 61.23 ") == len(TABLES)
    assert f"without: cannot, {why}\n" in out


# What must not be recorded as a figure.


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
        total_memory=80 * 10**9, major=9, minor=0, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 3 * 10**9)
    monkeypatch.setattr(report, "DRIVER", Path("nowhere"))
    return torch.device("cuda", 0)


def test_events_are_milliseconds(device: torch.device) -> None:
    clock, calls = Clock(device), []
    timing = clock.each(lambda: calls.append(1), repeats=3, warm_ups=2)
    assert (timing.median, timing.least, len(calls)) == (2e-3, 2e-3, 5)
    assert clock.together(lambda: None, repeats=4) == 5e-4
    assert clock.once(lambda: "done") == ("done", 2e-3)


def test_the_setup_of_a_gpu(device: torch.device) -> None:
    setup = describe(device)
    assert (setup["device"], setup["memory_gb"]) == ("a GPU", 80.0)
    assert (setup["compute_capability"], setup["multiprocessors"]) == ("9.0", 132)
    assert "driver" in setup


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
