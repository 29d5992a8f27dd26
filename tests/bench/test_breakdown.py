"""Where a step's time goes: the parts of the steps that requests take."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.clocks import own_time
from support.small_engines import BUSHY, build_engine, endless_base, engine_with_heads, random_heads
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.bench import breakdown
from medusa_kit.bench.breakdown import (
    ATTENTION,
    LINEAR,
    OTHER,
    PARTS,
    break_down,
    kernel_seconds,
    read_floor,
)
from medusa_kit.cli.bench_report import breakdown_table
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.cpu.binding.kernels import load_library
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.decode.node_choice.cost import StepCost
from medusa_kit.infer.decode.timing import Laps

PROMPTS = [[3, 4, 5], [6, 7]]


def through_torch(**kinds: Any) -> Engine:
    base = endless_base(24)
    engine = build_engine(base, attention="sdpa")  # asked for by name: no C++
    heads = random_heads(base, **kinds)
    return Engine(engine.verifier, engine.check, engine.scheduler, heads, BUSHY)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_steps_of_the_base_alone_and_with_heads(kind: str) -> None:
    engine = through_torch(kind=kind)
    found = break_down({"heads": engine}, PROMPTS, 8)
    assert list(found) == ["medusa-kit, plain decoding", "heads"]
    one, ours = found.values()
    for part in (one, ours):
        assert list(part.parts) == list(PARTS)
        assert all(seconds > 0 for seconds in (*part.parts.values(), part.step_seconds))
        assert part.parts["forward"] < part.step_seconds
    assert (one.num_nodes, ours.num_nodes) == (1, BUSHY.num_nodes)
    assert one.num_steps == 7, "the first token is the prompt's"
    linears = [m for m in engine.base.model.modules() if isinstance(m, torch.nn.Linear)]
    assert one.weight_bytes == 4 * sum(linear.weight.numel() for linear in linears)
    assert one.floor_seconds == ours.floor_seconds > 0


def test_nodes_are_those_that_decoding_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nodes are verified as they pay, and none does."""
    base = endless_base(24)
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, guesses="paying")
    assert engine.scheduler.steps is not None
    engine.scheduler.steps._cost = StepCost(measured={1: 1.0, 2: 3.0, 32: 100.0})
    found = break_down({"heads": engine}, PROMPTS[:1], 12)["heads"]
    stats = engine.generate(PROMPTS[0], max_new_tokens=12, drafter="medusa").stats
    assert found.num_nodes < 2
    assert found.num_nodes == pytest.approx(stats.nodes_per_step, abs=0.5)


def test_steps_that_take_equally_long_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Laps, "lap", lambda _: 1.0)
    one, _ = break_down({"heads": through_torch()}, PROMPTS, 8).values()
    assert (one.num_steps, one.step_seconds) == (7, 4.0)


def test_weights_that_steps_in_cpp_read() -> None:
    if load_library() is None:
        pytest.skip("no C++ kernels on this machine")
    model = tiny_model("llama", hidden_size=64, intermediate_size=64, head_dim=16)
    engine = engine_with_heads(wrap_model(model, None, "wide-tiny"))
    assert isinstance(engine.verifier, NativeVerifier), engine.verifier.steps_run_by
    (one, ours) = break_down({"heads": engine}, PROMPTS, 8).values()
    assert ours.weight_bytes == one.weight_bytes == engine.verifier.native.weight_bytes


def test_kernels_of_a_profile_by_kind() -> None:
    names = {"void flash_fwd_splitkv_kernel<cutlass>": 3.0, "split_kernel": 1.0,
             "nvjet_hsh_64x8": 20.0, "void gemv2T_kernel_val": 4.0, "Memcpy DtoH": 0.5,
             "void at::native::elementwise_kernel": 2.5, "cudaGraphLaunch": 0.0}  # fmt: skip
    events = [SimpleNamespace(key=k, self_device_time_total=v * 1e6) for k, v in names.items()]
    assert kernel_seconds(events, 2) == {
        ATTENTION: 2.0, LINEAR: 12.0, "copies": 0.25, OTHER: 1.25}  # fmt: skip
    table = breakdown_table({"x": replace(break_down({"h": through_torch()}, PROMPTS, 4)["h"],
                                          kernels=kernel_seconds(events, 2))}, "")  # fmt: skip
    assert "kernels: linear layers" in map(str, table.columns[0].cells)


def test_an_answer_without_a_step_has_no_breakdown() -> None:
    assert break_down({"heads": through_torch()}, PROMPTS, 1) == {}


def test_the_floor_of_more_bytes_than_the_buffer_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    own_time(monkeypatch, breakdown, perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("medusa_kit.bench.breakdown.FLOOR_BUFFER", 64)
    assert read_floor(256, torch.device("cpu"), repeats=3) == 4.0
