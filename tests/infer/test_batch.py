"""Rows that join and leave: whatever else is in the batch, each gets the tokens it gets alone.

The reference is transformers' own generate for greedy rows, and for those that draw the same
request alone, decoded plainly. Hypothesis chooses who comes when, with what, and who is cancelled.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.small_engines import BUSHY, build_engine, engine_with_heads, random_prompt
from support.tiny_models import tiny_base

from medusa_kit.drafters import draft_with
from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.text.suffix import SuffixDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode import Batch
from medusa_kit.infer.draft import Drafter
from medusa_kit.infer.request import Row, make_row
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree

FAMILIES = ["llama-tied", "gemma3", "gpt2", "gemma2"]  # the first two in C++, where it can be built
DRAFTERS = ["none", "heads", "other heads", "dynamic", "prompt-lookup", "auto"]
LONGEST = 14
DRAWN = SamplingParams(0.9, top_p=0.95, seed=5)


@dataclass(frozen=True)
class Request:
    arrives: int
    prompt: int  # its length, and the seed of its tokens
    tokens: int
    drafter: str
    drawn: bool
    leaves: int | None  # cancelled at this step, if it is still there


REQUESTS = st.lists(
    st.builds(
        Request,
        arrives=st.integers(0, 10),
        prompt=st.integers(1, 40),
        tokens=st.integers(1, LONGEST),
        drafter=st.sampled_from(DRAFTERS),
        drawn=st.booleans(),
        leaves=st.none() | st.integers(0, 14),
    ),
    min_size=1,
    max_size=7,
)


@cache
def engine_for(family: str) -> Engine:
    return engine_with_heads(tiny_base(family))


def drafters(engine: Engine) -> dict[str, Drafter]:
    """Each is shared by the rows that name it."""
    heads = engine.heads
    assert heads is not None
    context = DraftContext(engine.verifier, heads, tree=BUSHY, batch_size=4)
    return {
        **{name: build_drafter(name, context) for name in ("none", "prompt-lookup", "auto")},
        "heads": draft_with(heads, BUSHY),
        "other heads": draft_with(heads, CandidateTree.chain(2)),
        "dynamic": draft_with(heads, DynamicTree(5, (1.0, 1.0, 1.0))),
    }


@cache
def alone(family: str, prompt: int, drawn: bool) -> list[int]:
    """LONGEST tokens, or fewer where a stop token comes."""
    engine, ids = engine_for(family), random_prompt(prompt, prompt)
    if drawn:
        answer = engine.generate(
            ids, max_new_tokens=LONGEST, drafter="none", temperature=0.9, top_p=0.95, seed=5
        )
        return list(answer.token_ids)
    with torch.no_grad():
        out_1T = tiny_base(family).model.generate(
            torch.tensor([ids]), max_new_tokens=LONGEST, do_sample=False,
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        )  # fmt: skip
    return out_1T[0, len(ids) :].tolist()


def row_for(engine: Engine, request: Request) -> Row:
    sampling = DRAWN if request.drawn else SamplingParams()
    ids = random_prompt(request.prompt, request.prompt)
    return make_row(engine.verifier, ids, sampling, request.tokens)


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(requests=REQUESTS, max_rows=st.integers(1, 4), budget=st.none() | st.integers(1, 30))
def test_every_row_gets_what_it_gets_alone(
    family: str, requests: list[Request], max_rows: int, budget: int | None
) -> None:
    engine = engine_for(family)
    shared, batch = drafters(engine), Batch(engine.verifier, max_rows, prompt_budget=budget)
    rows = [row_for(engine, request) for request in requests]
    heard: dict[Row, list[int]] = {row: [] for row in rows}
    last = max(request.arrives for request in requests)
    step = 0
    while step <= last or batch.num_rows:
        for request, row in zip(requests, rows, strict=True):
            if request.arrives == step:
                batch.add(row, shared[request.drafter])
            if request.leaves == step and row.finish_reason is None:
                batch.cancel(row)
        for row, tokens in batch.step():
            heard[row] += tokens
        step += 1
        assert step < 500, "somebody starves"
    for request, row in zip(requests, rows, strict=True):
        expected = alone(family, request.prompt, request.drawn)[: request.tokens]
        if row.finish_reason == "cancelled":
            expected = expected[: len(row.token_ids)]
        assert row.token_ids == heard[row] == expected
    assert sorted(batch._schedule._free) == list(range(max_rows))


def test_a_row_that_is_cancelled_frees_its_place_within_a_step() -> None:
    engine = engine_for("llama-tied")
    batch, drafter = Batch(engine.verifier, 1), drafters(engine)["heads"]
    first, second = (row_for(engine, Request(0, n, LONGEST, "heads", False, None)) for n in (4, 9))
    for row in (first, second):
        batch.add(row, drafter)
    batch.step()
    assert len(first.token_ids) == 1
    batch.cancel(first)
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
    rows = [row_for(engine, Request(0, n, LONGEST, "", False, None)) for n in (5, 7)]
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
    rows = [row_for(engine, Request(0, n, LONGEST, "none", False, None)) for n in (3, 40)]
    batch.add(rows[0], drafter)
    batch.step()
    batch.step()
    batch.add(rows[1], drafter)
    while batch.num_rows:
        batch.step()
    for row, n in zip(rows, (3, 40), strict=True):
        assert row.token_ids == alone("llama-tied", n, False)


def test_answers_reach_a_store_of_past_answers_once_each() -> None:
    """Those that were cancelled do not."""
    engine = build_engine(tiny_base("llama-tied"))
    drafter = build_drafter("suffix", DraftContext(engine.verifier, batch_size=2))
    assert isinstance(drafter, SuffixDrafter)
    kept: list[list[int]] = []
    drafter.end = lambda answers: kept.extend(map(list, answers))  # type: ignore[method-assign]
    batch = Batch(engine.verifier, 2)
    rows = [row_for(engine, Request(0, n, n, "suffix", False, None)) for n in (4, 6, 8)]
    for row in rows:
        batch.add(row, drafter)
    batch.step()
    batch.cancel(rows[1])
    while batch.num_rows:
        batch.step()
    assert sorted(kept) == sorted([rows[0].token_ids, rows[2].token_ids])
