"""Rows that join and leave: whatever else is in the batch, each gets the tokens it gets alone.

Hypothesis chooses who comes when, with what, and who is cancelled.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.batches import (
    LONGEST,
    REQUESTS,
    Asked,
    alone,
    drafters,
    engine_for,
    expected,
    pieces_of,
    row_for,
    run,
)
from support.small_engines import BUSHY, build_engine
from support.tiny_models import tiny_base

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.text.suffix import SuffixDrafter
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.node_choice.cost import StepCost

FAMILIES = ["llama-tied", "gemma3", "gpt2", "gemma2"]  # the first two in C++, where it can be built


# Seconds of a step by its nodes: where all guesses pay, hardly any, or some.
COSTS = [{1: 1.0, 64: 1.001}, {1: 1.0, 2: 3.0}, {1: 7.4, 2: 8.3, 4: 10.7, 8: 18.2}]


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(requests=REQUESTS, max_rows=st.integers(1, 4), budget=st.none() | st.integers(1, 30),
       costs=st.none() | st.sampled_from(COSTS))  # fmt: skip
def test_every_row_gets_what_it_gets_alone(
    family: str, requests: list[Asked], max_rows: int, budget: int | None,
    costs: dict[int, float] | None,
) -> None:  # fmt: skip
    engine = engine_for(family)
    shared = drafters(engine)
    with pieces_of(budget) as pause:
        batch = Batch(engine.verifier, max_rows, max_pause=pause)
        batch.cost = None if costs is None else StepCost(measured=costs)
        rows = run(batch, requests, lambda request: shared[request.drafter], engine)
    for row, request in zip(rows, requests, strict=True):
        own = alone(family, request.prompt, request.drawn)
        assert row.token_ids == expected(row, request, own)
    assert sorted(batch._schedule._free) == list(range(max_rows))


def test_a_row_that_is_cancelled_frees_its_place_within_a_step() -> None:
    engine = engine_for("llama-tied")
    batch, drafter = Batch(engine.verifier, 1), drafters(engine)["heads"]
    first, second = (row_for(engine, n, LONGEST) for n in (4, 9))
    for row in (first, second):
        batch.add(row, drafter)
    batch.step()
    assert len(first.token_ids) == 1
    first.cancel()
    assert [row for row, _ in batch.step()] == [second]
    assert (first.finish_reason, first.is_complete, len(first.token_ids)) == ("cancelled", False, 1)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "falcon"])
def test_rows_with_fewer_nodes_are_padded_only_where_the_class_keeps_its_attention(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with one node beside a row with nine: in C++, in torch, and in Falcon's own class."""
    engine = engine_for(family)
    sizes: list[int] = []
    if family == "llama-tied":
        original = engine.verifier.native.score  # type: ignore

        def counted(cache: Any, nodes: Any, *rest: Any) -> Any:
            sizes.append(len(nodes.tokens_N))
            return original(cache, nodes, *rest)

        monkeypatch.setattr(engine.verifier.native, "score", counted)  # type: ignore
    else:

        def seen(module: Any, args: Any) -> None:
            sizes.append(args[0].numel())

        embedding = engine.base.model.get_input_embeddings()
        monkeypatch.setattr(embedding, "_forward_pre_hooks", {0: seen})
    batch, shared = Batch(engine.verifier, 2), drafters(engine)
    rows = [row_for(engine, n, LONGEST) for n in (5, 7)]
    for row, name in zip(rows, ("none", "heads"), strict=True):
        batch.add(row, shared[name])
    batch.step()
    sizes.clear()
    batch.step()
    padding = BUSHY.num_nodes - 1 if family == "falcon" else 0
    assert sizes == [1 + BUSHY.num_nodes + padding]
    assert [row.num_padding for row in rows] == [padding, 0]


def test_a_batch_makes_room_for_a_longer_row() -> None:
    engine = engine_for("llama-tied")
    batch, drafter = Batch(engine.verifier, 2), drafters(engine)["none"]
    rows = [row_for(engine, n, LONGEST) for n in (3, 40)]
    batch.add(rows[0], drafter)
    batch.step()
    batch.step()
    batch.add(rows[1], drafter)
    while batch.num_requests:
        batch.step()
    for row, n in zip(rows, (3, 40), strict=True):
        assert row.token_ids == alone("llama-tied", n, False)


def test_answers_reach_a_store_of_past_answers_once_each(tmp_path: Path) -> None:
    """Those that were cancelled do not."""
    engine = build_engine(tiny_base("llama-tied"))
    context, options = DraftContext(engine.verifier, batch_size=2), {"store": str(tmp_path / "p")}
    drafter = build_drafter("suffix", context, options)
    assert isinstance(drafter, SuffixDrafter)
    assert drafter.past is not None
    batch = Batch(engine.verifier, 2)
    rows = [row_for(engine, n, n) for n in (4, 6, 8)]
    for row in rows:
        batch.add(row, drafter)
    batch.step()
    rows[1].cancel()
    while batch.num_requests:
        batch.step()
    kept = [answer.tolist() for answer in drafter.past]
    assert sorted(kept) == sorted([rows[0].token_ids, rows[2].token_ids])
