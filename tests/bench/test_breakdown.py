"""Where a step's time goes: the parts; afterwards the engine is as before."""

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
    ACCEPT,
    ATTENTION,
    CACHE,
    CAPTURED,
    HEADS,
    LINEAR,
    MODEL,
    NATIVE,
    OTHER,
    PYTHON,
    TREE,
    Stopwatch,
    break_down,
    kernel_seconds,
    read_floor,
)
from medusa_kit.cli.bench_report import breakdown_table
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.cpu.kernels import load_library
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.tree_cache import TreeCache, TreeCacheLayer
from medusa_kit.tree.dynamic import DynamicTree

PROMPTS = [[3, 4, 5], [6, 7]]
MODEL_PARTS = {LINEAR, ATTENTION, MODEL}


def through_torch(**kinds: Any) -> Engine:
    base = endless_base(24)
    engine = build_engine(base, attention="sdpa")  # asked for by name: no C++
    heads = random_heads(base, **kinds)
    return Engine(engine.verifier, engine.check, heads, BUSHY)


def test_time_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    own_time(monkeypatch, breakdown, perf_counter=lambda: now)

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    watch = Stopwatch(torch.device("cpu"))
    inner = watch.timed(lambda: passes(4.0), LINEAR)
    heads = watch.timed(lambda: (passes(8.0), inner()), HEADS)
    with watch.part(PYTHON):
        passes(1.0)
        with watch.part(MODEL):
            passes(2.0)
            inner()
        heads()
        passes(16.0)
    assert watch.spent == {PYTHON: 17.0, MODEL: 2.0, LINEAR: 4.0, HEADS: 12.0}


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_parts_of_steps_through_torch(kind: str) -> None:
    """The base alone is what a step of one node takes, whatever heads there are."""
    engine = through_torch(kind=kind)
    found = break_down({"heads": engine}, PROMPTS, 8)
    assert list(found) == ["medusa-kit, plain decoding", "heads"]
    one, ours = found.values()
    always = {TREE, ACCEPT, CACHE, PYTHON, *MODEL_PARTS}
    assert (set(one.parts), set(ours.parts)) == (always, always | {HEADS})
    assert (one.num_nodes, ours.num_nodes) == (1, BUSHY.num_nodes)
    assert one.num_steps == 7, "the first token is the prompt's"
    linears = [m for m in engine.base.model.modules() if isinstance(m, torch.nn.Linear)]
    assert one.weight_bytes == 4 * sum(linear.weight.numel() for linear in linears)
    assert all(value > 0 for value in (ours.step_seconds, ours.undisturbed_seconds))
    assert one.floor_seconds == ours.floor_seconds > 0


def test_parts_of_steps_in_cpp() -> None:
    if load_library() is None:
        pytest.skip("no C++ kernels on this machine")
    model = tiny_model("llama", hidden_size=64, intermediate_size=64, head_dim=16)
    engine = engine_with_heads(wrap_model(model, None, "wide-tiny"))
    assert isinstance(engine.verifier, NativeVerifier), engine.verifier.steps_run_by
    (one, ours) = break_down({"heads": engine}, PROMPTS, 8).values()
    assert NATIVE in one.parts
    assert set(ours.parts) == {HEADS, TREE, NATIVE, ACCEPT, CACHE, PYTHON}
    assert ours.weight_bytes == engine.verifier.native.weight_bytes


def test_parts_of_a_tree_grown_at_each_step() -> None:
    engine = through_torch()
    engine.use_tree(DynamicTree(6, (1.0, 1.0), 3, 3))
    assert break_down({"heads": engine}, PROMPTS, 8)["heads"].parts[HEADS] > 0


def test_a_captured_forward_is_one_part() -> None:
    """Nothing inside it appears, of static and grown trees, and the report says what ran."""
    base = endless_base(14)
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always")
    prompts = [[token % 14 for token in prompt] for prompt in PROMPTS]
    one, ours = break_down({"heads": engine}, prompts, 8).values()
    engine.use_tree(DynamicTree(6, (1.0, 1.0), 3, 3))
    grown = break_down({"heads": engine}, prompts, 8)["heads"]
    around = {TREE, CAPTURED, ACCEPT, CACHE, PYTHON}
    for found, parts in ((one, around), (ours, {HEADS, *around}), (grown, {HEADS, *around})):
        assert set(found.parts) == parts
        assert found.steps_run_by == engine.steps_run_by == "torch, fixed shapes (sdpa)"
        assert found.kernels == {}, "there is no CUDA here"


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


def test_afterwards_nothing_is_watched() -> None:
    engine = through_torch()
    before = (TreeCache.commit, TreeCacheLayer.update, AttentionChoice.attend)
    said = engine.generate(PROMPTS, max_new_tokens=8)
    break_down({"heads": engine}, PROMPTS, 8)
    assert before == (TreeCache.commit, TreeCacheLayer.update, AttentionChoice.attend)
    owners = [engine.verifier.attention, engine.base, engine.heads,
              *engine.base.model.modules()]  # fmt: skip
    assert not [o for o in owners if {"forward", "attend", "hidden_and_logits"} & set(vars(o))]
    again = engine.generate(PROMPTS, max_new_tokens=8)
    assert [r.token_ids for r in again] == [r.token_ids for r in said]


def test_an_answer_without_a_step_has_no_breakdown() -> None:
    assert break_down({"heads": through_torch()}, PROMPTS, 1) == {}


def test_the_floor_of_more_bytes_than_the_buffer_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    own_time(monkeypatch, breakdown, perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("medusa_kit.bench.breakdown.FLOOR_BUFFER", 64)
    assert read_floor(256, torch.device("cpu"), repeats=3) == 4.0


def test_a_stopwatch_waits_for_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the current device."""
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    with Stopwatch(torch.device("cuda", 1)).part(MODEL):
        pass
    assert waited == [torch.device("cuda", 1)] * 2
