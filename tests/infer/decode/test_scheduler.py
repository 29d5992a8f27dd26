"""Requests that join a scheduler and leave it, step by step: whatever else is there, and whatever
fails, each gets the tokens that it gets alone.

Hypothesis chooses who comes when, with what, who is cancelled and which calls fail.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.batches import (
    LONGEST,
    REQUESTS,
    Asked,
    Serving,
    alone,
    check_slots,
    drafters,
    engine_for,
    exact,
    expected,
    pieces_of,
    row_for,
    run,
    served,
)
from support.small_engines import BUSHY, build_engine
from support.tiny_models import tiny_base
from support.wrapped import Wrapped, WrappedVerifier

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.text.suffix import SuffixDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.drafter import StepResult
from medusa_kit.infer.decode.node_choice.cost import LearnedSteps, StepCost
from medusa_kit.infer.decode.timing import StepTiming
from medusa_kit.infer.tree_cache import TreeCache

FAMILIES = ["llama-tied", "gemma3", "gpt2", "gemma2"]  # the first two in C++, where it can be built
# Seconds of a step by its nodes: where all guesses pay, hardly any, or some.
COSTS = [{1: 1.0, 64: 1.001}, {1: 1.0, 2: 3.0}, {1: 7.4, 2: 8.3, 4: 10.7, 8: 18.2}]
OF_VERIFIER, OF_CACHE = ("score", "read_prompts"), ("commit", "copy_first")
OF_DRAFTERS = ("begin", "propose", "candidates", "select", "observe", "finish")
DONE_FIRST = ("score", "read_prompts", "copy_first", "begin", "finish")
Plan = dict[str, set[int]]  # by method: which of its calls fail
PLANS = st.just(Plan()) | st.dictionaries(
    st.sampled_from([*OF_VERIFIER, *OF_CACHE, *OF_DRAFTERS]),
    st.sets(st.integers(1, 12), max_size=3),
    max_size=4,
)


class Fault(Exception):
    """Raised by this test alone."""


def failing(engine: Engine, plan: Plan) -> tuple[Any, dict[str, Any], list[TreeCache]]:
    """A verifier and drafters of which these calls fail, half of them when their work is done; and
    the caches that are made."""
    calls, caches = Counter[str](), list[TreeCache]()

    def fault(name: str) -> Callable[..., Any]:
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if calls[name] in plan.get(name, ()):
                if calls[name] % 2 and name in DONE_FIRST:
                    original(*args, **kwargs)
                raise Fault(name)
            return original(*args, **kwargs)

        return call

    def new_cache(original: Callable[..., Any], *sizes: int) -> Any:
        cache = original(*sizes)
        for name in OF_CACHE:
            setattr(cache, name, partial(fault(name), getattr(cache, name)))
        caches.append(cache)
        return cache

    scoring = {name: fault(name) for name in OF_VERIFIER}
    drafting = {name: fault(name) for name in OF_DRAFTERS if name != "select"}
    drafting["candidates"] = selecting(drafting["candidates"], fault("select"))
    verifier = WrappedVerifier(engine.verifier, new_cache=new_cache, **scoring)
    shared = {name: Wrapped(drafter, **drafting) for name, drafter in drafters(engine).items()}
    return verifier, shared, caches


def selecting(candidates: Callable[..., Any], select: Callable[..., Any]) -> Callable[..., Any]:
    """`candidates`, of which a selection is `select`."""

    def call(original: Callable[..., Any], *args: Any) -> Any:
        return Wrapped(candidates(original, *args), select=select)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=35, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(requests=REQUESTS, max_rows=st.integers(1, 4), budget=st.none() | st.integers(1, 30),
       costs=st.none() | st.sampled_from(COSTS), plan=PLANS)  # fmt: skip
def test_each_request_gets_what_it_gets_alone_or_fails(
    family: str, requests: list[Asked], max_rows: int, budget: int | None,
    costs: dict[int, float] | None, plan: Plan,
) -> None:  # fmt: skip
    engine = engine_for(family)
    verifier, shared, caches = failing(engine, plan)
    steps = None if costs is None else LearnedSteps(StepCost(measured=costs))
    with pieces_of(budget) as pause:
        scheduler = Serving(verifier, max_rows, pause, reuse_prefixes=True, steps=steps)
        rows = run(scheduler, requests, shared, engine)
    for row, request in zip(rows, requests, strict=True):
        own = expected(row, request, alone(family, request.prompt, request.drawn))
        if row.error is not None:
            assert isinstance(row.error, Fault)
            assert plan
            own = own[: len(row.token_ids)]
        assert row.token_ids == own
    plan.clear()
    assert scheduler.stats.cached_tokens <= sum(caches[0].lengths)
    check_slots(scheduler, family, [request.prompt for request in requests])


def test_a_request_that_is_cancelled_frees_its_slot_within_a_step() -> None:
    engine = engine_for("llama-tied")
    scheduler, drafter = Serving(engine.verifier, 1), drafters(engine)["heads"]
    first, second = (row_for(engine, n, LONGEST) for n in (4, 9))
    for row in (first, second):
        scheduler.add(row, drafter)
    scheduler.step()
    assert len(first.token_ids) == 1
    first.cancel()
    assert [row for row, _ in scheduler.step()] == [second]
    assert (first.finish_reason, first.is_complete, len(first.token_ids)) == ("cancelled", False, 1)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "falcon"])
def test_padding_is_counted_where_the_class_keeps_its_attention(family: str) -> None:
    """A request with one node beside one with nine: in C++, in torch, and in Falcon's own class."""
    engine = engine_for(family)
    scheduler, shared = Serving(engine.verifier, 2), drafters(engine)
    rows = [row_for(engine, n, LONGEST) for n in (5, 7)]
    for row, name in zip(rows, ("none", "heads"), strict=True):
        scheduler.add(row, shared[name])
    for _ in range(2):
        scheduler.step()
    assert scheduler.stats.nodes == 1 + BUSHY.num_nodes
    padding = BUSHY.num_nodes - 1 if family == "falcon" else 0
    assert [row.num_padding for row in rows] == [padding, 0]


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_prompts_that_come_together_are_read_in_one_forward(family: str) -> None:
    engine, calls = engine_for(family), list[int]()

    def read(read_prompts: Callable[..., Any], cache: Any, slots: Any, *others: Any) -> Any:
        calls.append(len(slots))
        return read_prompts(cache, slots, *others)

    verifier: Any = WrappedVerifier(engine.verifier, read_prompts=read)
    scheduler, drafter = Serving(verifier, 3), drafters(engine)["none"]
    rows = [row_for(engine, n, LONGEST, verifier=verifier) for n in (5, 7, 6)]
    for row in rows:
        scheduler.add(row, drafter)
    served(scheduler, rows)
    assert calls == [3]
    assert [row.token_ids for row in rows] == [exact(family, row) for row in rows]


def test_room_is_made_for_a_longer_request() -> None:
    engine = engine_for("llama-tied")
    scheduler, drafter = Serving(engine.verifier, 2), drafters(engine)["none"]
    rows = [row_for(engine, n, LONGEST) for n in (3, 40)]
    scheduler.add(rows[0], drafter)
    for _ in range(2):
        scheduler.step()
    scheduler.add(rows[1], drafter)
    served(scheduler, rows)
    assert [row.token_ids for row in rows] == [exact("llama-tied", row) for row in rows]


def test_a_drafter_learns_by_the_clock_of_the_step() -> None:
    engine, seen = engine_for("llama-tied"), list[StepTiming]()

    def observe(original: Callable[..., Any], step: StepResult) -> None:
        assert step.timing is not None
        seen.append(step.timing)
        original(step)

    scheduler, row = Serving(engine.verifier, 1), row_for(engine, 5, LONGEST)
    drafter: Any = Wrapped(drafters(engine)["heads"], observe=observe)
    scheduler.add(row, drafter)
    scheduler.step()  # reads the prompt
    for count in (1, 2):
        scheduler.step()
        assert row.timing is not None
        assert len(seen) == count
        assert replace(row.timing, rest=0.0) == seen[-1]
        assert seen[-1].forward > 0


def test_answers_reach_a_store_of_past_answers_once_each(tmp_path: Path) -> None:
    """Those that were cancelled do not."""
    engine = build_engine(tiny_base("llama-tied"))
    context, options = DraftContext(engine.verifier, batch_size=2), {"store": str(tmp_path / "p")}
    drafter = build_drafter("suffix", context, options)
    assert isinstance(drafter, SuffixDrafter)
    assert drafter.past is not None
    scheduler = Serving(engine.verifier, 2)
    rows = [row_for(engine, n, n) for n in (4, 6, 8)]
    for row in rows:
        scheduler.add(row, drafter)
    scheduler.step()
    rows[1].cancel()
    served(scheduler, rows)
    kept = [answer.tolist() for answer in drafter.past]
    assert sorted(kept) == sorted([rows[0].token_ids, rows[2].token_ids])
