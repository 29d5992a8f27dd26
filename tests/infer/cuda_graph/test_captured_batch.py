"""Rows that join and leave a batch whose steps run whole on the device, where they can."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from medusa_kit.infer.cuda_graph.runner import GraphRunner
from support.batches import LONGEST, REQUESTS, Request, alone, drafters, expected, row_for, run
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, DeviceMemoryError
from medusa_kit.infer.batch import Batch
from medusa_kit.infer.cuda_graph import runner
from medusa_kit.infer.cuda_graph.step import GraphStep
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.request import Row

FIXED = "torch, fixed shapes (sdpa)"


@cache
def engine_for(family: str) -> Engine:
    base = tiny_base(family)
    return build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always")


def graphs_of(engine: Engine) -> GraphRunner:
    assert engine.graphs is not None
    return engine.graphs


def captured_auto(engine: Engine) -> Drafter:
    context = DraftContext(engine.verifier, engine.heads, tree=BUSHY, batch_size=4, on_device=True)
    drafter: Any = build_drafter("auto", context)
    assert drafter.host_trees is not None
    return drafter


@pytest.fixture(scope="module", autouse=True)
def steps_of_many_sizes() -> Any:
    """So that rows move between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "FEWEST_SLOTS", 16)
        patch.setattr(runner, "WORTH_A_STEP", 1)
        yield


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(requests=REQUESTS, max_rows=st.integers(1, 4), budget=st.none() | st.integers(1, 30))
def test_every_row_gets_what_it_gets_alone(
    family: str, requests: list[Request], max_rows: int, budget: int | None
) -> None:
    engine = engine_for(family)
    graphs, shared = graphs_of(engine), drafters(engine)
    auto = captured_auto(engine)

    def drafter_of(request: Request) -> Drafter:
        greedy_auto = request.drafter == "auto" and not request.drawn
        return auto if greedy_auto else shared[request.drafter]

    batch = Batch(engine.verifier, max_rows, max_pause=budget, graphs=graphs)
    rows = run(batch, requests, drafter_of, engine)
    for row, request in zip(rows, requests, strict=True):
        assert row.token_ids == expected(row, request, alone(family, request.prompt, request.drawn))
        if request.drawn or request.drafter in ("dynamic", "prompt-lookup"):
            assert row.steps_run_by == "torch"
    assert graphs.lent is None
    assert sorted(batch._schedule._free) == list(range(max_rows))


def greedy(engine: Engine, prompt: int, tokens: int = LONGEST) -> Row:
    return row_for(engine, prompt, tokens)


@pytest.mark.parametrize("name", ["heads", "auto"])
def test_rows_join_and_leave_a_step_that_grows_and_shrinks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, then four, then a long one alone; what has joined stays where it is run."""
    engine = engine_for("llama")
    graphs_of(engine).forget()
    drafter = captured_auto(engine) if name == "auto" else drafters(engine)["heads"]
    batch = Batch(engine.verifier, 4, graphs=graphs_of(engine))
    rows = [greedy(engine, n) for n in (3, 5, 9, 4)] + [greedy(engine, 40)]
    sizes: list[int] = []

    def step() -> None:
        batch.step()
        lent = graphs_of(engine).lent
        sizes.append(0 if lent is None else lent.batch_size)
        if lent is not None:  # those that have left rest
            (group,) = batch._captured.values()
            assert int(lent.active_B.sum()) == len(group.rows)

    batch.add(rows[0], drafter)
    step(), step()
    for row in rows[1:4]:
        batch.add(row, drafter)
    while batch.num_rows:
        step()
        if rows[0].is_complete and not rows[4].token_ids and rows[4] not in batch._drafters:
            batch.add(rows[4], drafter)
    assert [row.token_ids for row in rows] == [
        alone("llama", n, False)[: len(row.token_ids)]
        for n, row in zip((3, 5, 9, 4, 40), rows, strict=True)
    ]
    assert all(row.is_complete for row in rows)
    assert {row.steps_run_by for row in rows} == {FIXED}
    assert (sizes[:2], max(sizes), sizes[-1]) == ([0, 1], 4, 1)


def test_rows_that_a_step_has_no_room_for_wait_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no larger step can be made."""
    engine = engine_for("llama")
    graphs_of(engine).forget()
    batch, drafter = Batch(engine.verifier, 3, graphs=graphs_of(engine)), drafters(engine)["none"]
    rows = [greedy(engine, n) for n in (3, 5, 9)]
    batch.add(rows[0], drafter)
    batch.step(), batch.step()
    advance = GraphStep.advance

    def no_room(step: GraphStep) -> None:
        if step.batch_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        advance(step)

    monkeypatch.setattr(GraphStep, "advance", no_room)
    for row in rows[1:]:
        batch.add(row, drafter)
    while batch.num_rows:
        batch.step()
    for row, n in zip(rows, (3, 5, 9), strict=True):
        assert (row.token_ids, row.steps_run_by) == (alone("llama", n, False), FIXED)


def test_an_answer_from_the_device_is_a_prefix_for_the_next_turn() -> None:
    """Its keys and values are copied back; near-ties are counted there too."""
    engine = engine_for("llama")
    batch, drafter = Batch(engine.verifier, 2, graphs=graphs_of(engine)), drafters(engine)["heads"]
    first = greedy(engine, 20)
    batch.add(first, drafter)
    while batch.num_rows:
        batch.step()
    text = [*first.prompt_ids, *first.token_ids, *random_prompt(3, 3)]
    (expected_ids,) = [engine.generate(text, max_new_tokens=8, drafter="none").token_ids]
    for tolerance, near_ties in ((0.0, 0), (1e9, 8)):
        row = greedy(engine, 20, 8)
        row.prompt_ids, row.rounding_tolerance = list(text), tolerance
        row.stop_ids = frozenset()
        batch.add(row, drafter)
        while batch.num_rows:
            batch.step()
        assert row.num_cached >= len(text) - 4
        assert (row.token_ids, row.steps_run_by) == (expected_ids, FIXED)
        assert row.near_ties == near_ties


def test_one_drafter_for_rows_of_which_some_are_drawn_is_refused() -> None:
    engine = engine_for("llama")
    batch, drafter = Batch(engine.verifier, 2, graphs=graphs_of(engine)), captured_auto(engine)
    batch.add(greedy(engine, 5), drafter)
    with pytest.raises(ConfigError, match="a drafter for each way of sampling"):
        batch.add(row_for(engine, 5, 5, True), drafter)


def test_memory_that_runs_out_in_a_step_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps', which no later request has to make room for."""
    engine = engine_for("llama")
    engine.generate(random_prompt(5, 5), max_new_tokens=3)
    assert graphs_of(engine)._steps

    def no_room(step: GraphStep) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(GraphStep, "run", no_room)
        with pytest.raises(DeviceMemoryError):
            engine.generate(random_prompt(5, 5), max_new_tokens=3, drafter="medusa")
    assert graphs_of(engine)._steps == []
    answer = engine.generate(random_prompt(5, 5), max_new_tokens=3, drafter="medusa")
    assert (answer.token_ids, answer.stats.steps_run_by) == (alone("llama", 5, False)[:3], FIXED)
