"""Which step of fixed shapes a request gets, how long steps are kept, and what rows cost."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from medusa_kit.infer.cuda_graph.host_trees import HostTreeSize
from medusa_kit.infer.cuda_graph.runner import GraphRunner, num_rows, num_slots
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.drafters import draft_with
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import DeviceMemoryError
from medusa_kit.infer.cuda_graph import runner
from medusa_kit.infer.cuda_graph.cache import StaticTreeCache
from medusa_kit.infer.cuda_graph.step import GraphStep
from medusa_kit.infer.decode import decode
from medusa_kit.infer.request import Row, make_row
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.sampling import SamplingParams

FIXED = "torch, fixed shapes (sdpa)"
PROMPTS = [random_prompt(3 + length, length) for length in range(8)]


def static_engine(family: str = "llama") -> tuple[Engine, GraphRunner]:
    """An engine that never stops by itself, and its steps."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    base = wrap_model(model)
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always")
    assert engine.graphs is not None
    return engine, engine.graphs


def rows_and_slots(graphs: GraphRunner) -> list[tuple[int, int]]:
    return [(step.batch_size, step.num_slots) for step in graphs._steps]


def test_rounding() -> None:
    assert [num_rows(n) for n in range(1, 10)] == [1, 2, 4, 4, 6, 6, 8, 8, 12]
    assert all(num_rows(n) < 1.5 * n for n in range(1, 200))
    assert [num_slots(n, 10_000) for n in (1, 257, 9_000)] == [256, 512, 10_048]


def test_a_step_that_is_large_enough_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three shapes in turn, which two kept steps would have to make anew each time."""
    monkeypatch.setattr(runner, "FEWEST_SLOTS", 16)
    engine, graphs = static_engine()
    engine.generate(PROMPTS[0], max_new_tokens=100)
    assert rows_and_slots(graphs) == [(1, 128)]
    engine.generate(PROMPTS[0], max_new_tokens=30)  # 42 slots: within four times
    assert rows_and_slots(graphs) == [(1, 128)]
    engine.generate(PROMPTS[0], max_new_tokens=4)  # 16 slots: 128 are too many
    assert rows_and_slots(graphs) == [(1, 128), (1, 16)]
    engine.generate(PROMPTS[:3], max_new_tokens=4)
    engine.generate(PROMPTS[:2], max_new_tokens=4)  # two rows in the step for four
    assert rows_and_slots(graphs) == [(1, 128), (1, 16), (4, 32)]
    steps = set(map(id, graphs._steps))
    for prompts, tokens in [(PROMPTS[:1], 100), (PROMPTS[:1], 4), (PROMPTS[:3], 4)] * 3:
        results = engine.generate(prompts, max_new_tokens=tokens)
        assert {result.stats.steps_run_by for result in results} == {FIXED}
    assert set(map(id, graphs._steps)) == steps


def test_steps_are_kept_by_the_memory_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, graphs = static_engine()
    for rows in (1, 2, 4, 8):
        engine.generate(PROMPTS[:rows], max_new_tokens=2)
    one = graphs._steps[0].num_bytes
    assert [step.num_bytes for step in graphs._steps] == [one, 2 * one, 4 * one, 8 * one]
    slots, heads, numbers = graphs._steps[0].num_slots, 2, 8 * torch.float32.itemsize
    assert one == 3 * 2 * slots * heads * numbers  # layers, keys and values
    graphs.forget()
    assert graphs._steps == []
    monkeypatch.setattr(runner, "most_kept", lambda _: 7 * one)
    for rows in (1, 2, 4, 1):
        engine.generate(PROMPTS[:rows], max_new_tokens=2)
    assert [step.batch_size for step in graphs._steps] == [2, 4, 1]  # used last comes last
    block = weakref.ref(graphs._steps[1].cache._block)
    gc.disable()  # cache and layers hold each other; their memory must not wait for a collection
    try:
        engine.generate(PROMPTS[:8], max_new_tokens=2)
        assert block() is None
    finally:
        gc.enable()
    assert [step.batch_size for step in graphs._steps] == [8]  # the newest stays in any case


def out_of_memory(times: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[int] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        if len(calls) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return plain(*args, **kwargs)

    return refuse


@pytest.mark.parametrize(
    ("owner", "name"), [(GraphStep, "advance"), (Verifier, "read_prompts")], ids=["step", "prompt"]
)
def test_memory_that_runs_out_once_is_taken_from_steps_that_wait(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, graphs = static_engine()
    expected = engine.generate(PROMPTS[:3], max_new_tokens=4)
    graphs.forget()
    engine.generate(PROMPTS[0], max_new_tokens=4)
    waiting = graphs._steps[0]
    monkeypatch.setattr(owner, name, out_of_memory(1, getattr(owner, name)))
    results = engine.generate(PROMPTS[:3], max_new_tokens=4)
    assert [result.token_ids for result in results] == [one.token_ids for one in expected]
    assert {result.stats.steps_run_by for result in results} == {FIXED}
    assert [step.batch_size for step in graphs._steps] == [4]
    assert waiting.cache._block is None


def test_too_little_memory_fails_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, graphs = static_engine()
    with monkeypatch.context() as patch:
        patch.setattr(GraphStep, "advance", out_of_memory(2, GraphStep.advance))
        with pytest.raises(
            DeviceMemoryError, match="no room for 3 sequences of up to 18 tokens"
        ) as caught:
            engine.generate(PROMPTS[:3], max_new_tokens=4)
    assert "with 10 nodes each: the cache takes about" in caught.value.message
    assert "a tree of at most 5 nodes" in (caught.value.hint or "")
    assert graphs._steps == []
    assert engine.generate(PROMPTS[0], max_new_tokens=4).stats.steps_run_by == FIXED


# Rows that have finished.


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that each step computes."""
    rows: list[int] = []
    plain = GraphStep.run

    def run(self: GraphStep) -> list[list[int]]:
        rows.append(self.batch_size)
        return plain(self)

    monkeypatch.setattr(GraphStep, "run", run)
    return rows


def answers_alone(family: str, limits: list[int]) -> list[list[int]]:
    model, answers = tiny_model(family), []
    model.generation_config.eos_token_id = None
    for prompt, tokens in zip(PROMPTS, limits, strict=False):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def test_rows_that_finish_are_not_computed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding of limits 90, 4 x 5, 9, 9, 17: a token a row a step, the first one before."""
    engine, graphs = static_engine()
    rows, limits = counted(monkeypatch), [90, 4, 4, 9, 4, 9, 4, 17]
    requests = [make_row(engine.verifier, p, SamplingParams(), n)
                for p, n in zip(PROMPTS, limits, strict=True)]  # fmt: skip
    list(decode(engine.verifier, PlainDrafter(engine.base.device), requests, engine.graphs))
    assert [row.token_ids for row in requests] == answers_alone("llama", limits)
    assert rows == [8] * 3 + [4] * 5 + [2] * 8 + [1] * 73
    assert sorted(step.batch_size for step in graphs._steps) == [1, 2, 4, 8]
    assert not any(step.busy for step in graphs._steps)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_rows_go_on_in_a_smaller_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads, whatever place the rows that go on had, and with fewer slots than before."""
    monkeypatch.setattr(runner, "FEWEST_SLOTS", 16)
    engine, _ = static_engine(family)
    rows, limits = counted(monkeypatch), [3, 30, 3, 100, 3]
    requests = [make_row(engine.verifier, p, SamplingParams(), n)
                for p, n in zip(PROMPTS, limits, strict=False)]  # fmt: skip
    list(decode(engine.verifier, draft_with(engine.heads, BUSHY), requests, engine.graphs))
    assert [row.token_ids for row in requests] == answers_alone(family, limits)
    assert (rows[0], rows[-1]) == (6, 1)
    assert rows.count(6) < 3


def test_an_answer_that_is_nearly_over_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is made for few tokens; one at hand is taken. Nor is one compiled meanwhile."""
    engine, graphs = static_engine()
    rows, limits = counted(monkeypatch), [30, 3, 3, 3]

    def steps_for(tokens: int) -> list[int]:
        rows.clear()
        limits[0] = tokens
        requests = [make_row(engine.verifier, p, SamplingParams(), n)
                    for p, n in zip(PROMPTS, limits, strict=False)]  # fmt: skip
        list(decode(engine.verifier, PlainDrafter(engine.base.device), requests, engine.graphs))
        return rows

    assert steps_for(30) == [4] * 29
    graphs.compiled = lambda: pytest.fail("a step was compiled in the midst of an answer")
    assert steps_for(90) == [4] * 89
    graphs.compiled = None
    engine.generate(PROMPTS[0], max_new_tokens=4, drafter="none")
    assert steps_for(30) == [4] * 2 + [1] * 27


def test_a_smaller_step_that_has_no_room_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, graphs = static_engine()
    rows, plain, tried = counted(monkeypatch), GraphStep.advance, []

    def advance(self: GraphStep) -> None:
        if self.batch_size == 1:
            tried.append(self.num_slots)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        plain(self)

    monkeypatch.setattr(GraphStep, "advance", advance)
    requests = [make_row(engine.verifier, PROMPTS[n], SamplingParams(), tokens)
                for n, tokens in enumerate([100, 3])]  # fmt: skip
    list(decode(engine.verifier, draft_with(engine.heads, BUSHY), requests, engine.graphs))
    assert [row.token_ids for row in requests] == answers_alone("llama", [100, 3])
    assert set(rows) == {2}
    assert len(tried) == 1, "tried again at each step"
    assert [step.busy for step in graphs._steps] == [False]


@pytest.mark.parametrize("drafter", ["medusa", "auto"])
def test_a_move_to_a_smaller_step_that_fails_costs_the_request_alone(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was; the next request finds all steps free."""
    engine, graphs = static_engine()

    def rows_of_unlike_limits() -> list[Row]:
        rows = [make_row(engine.verifier, prompt, SamplingParams(), tokens)
                for prompt, tokens in zip(PROMPTS, [90, 3], strict=False)]  # fmt: skip
        list(decode(engine.verifier, engine._drafter(drafter, None, 2), rows, engine.graphs))
        return rows

    for error in (KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory.")):

        def interrupted(*_: Any, raised: BaseException = error) -> None:
            raise raised

        with monkeypatch.context() as patch:
            patch.setattr(StaticTreeCache, "copy_rows", interrupted)
            with pytest.raises((type(error), DeviceMemoryError)):
                rows_of_unlike_limits()
        assert not any(step.busy for step in graphs._steps)
        rows = rows_of_unlike_limits()
        assert [row.token_ids for row in rows] == answers_alone("llama", [90, 3])
        assert {row.steps_run_by for row in rows} == {FIXED}


@pytest.mark.parametrize(("owner", "drafter"), [(GraphStep, "medusa"), (HostTreeSize, "auto")])
def test_a_step_that_cannot_be_made_holds_no_memory(
    owner: Any, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = static_engine()
    advance, blocks = owner.advance, list[weakref.ref[torch.Tensor]]()

    def fail(self: Any) -> None:
        advance(self)
        blocks.append(weakref.ref(self.cache._block))
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(owner, "advance", fail)
    gc.disable()  # memory must not wait for a collection
    try:
        engine.generate(PROMPTS[0], max_new_tokens=4, drafter=drafter)
        assert [block() for block in blocks] == [None]
    finally:
        gc.enable()


def test_memory_is_taken_from_caches_of_earlier_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's caches, which wait for a collection, where no step waits."""
    engine, graphs = static_engine()
    engine.batches = None
    read, caches = Verifier.read_prompts, list[weakref.ref[Any]]()

    def with_room_for_one(self: Verifier, cache: Any, *prompts: Any) -> Any:
        if any(earlier() is not None for earlier in caches):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        result = read(self, cache, *prompts)
        caches.append(weakref.ref(cache))
        return result

    monkeypatch.setattr(Verifier, "read_prompts", with_room_for_one)
    gc.disable()
    try:
        for _ in range(2):
            engine.generate(PROMPTS[0], max_new_tokens=4, temperature=0.8)
    finally:
        gc.enable()
    assert (len(caches), graphs._steps) == (2, [])


@pytest.mark.parametrize("drafter", ["medusa", "auto"])
def test_a_request_that_overflowed_spoils_no_later_one(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN that an earlier request left in a step's slots, hidden ones too, and in a smaller one's
    that has more slots than the one before."""
    monkeypatch.setattr(runner, "FEWEST_SLOTS", 16)
    monkeypatch.setattr(runner, "WORTH_A_STEP", 1)
    engine, graphs = static_engine()
    engine.generate(PROMPTS[0], max_new_tokens=100, drafter=drafter)
    engine.generate(PROMPTS[:2], max_new_tokens=30, drafter=drafter)
    with torch.inference_mode():
        for step in graphs._steps:
            for tensor in step.cache._tensors():
                tensor.fill_(float("nan"))
    rows = [make_row(engine.verifier, prompt, SamplingParams(), tokens)
            for prompt, tokens in zip(PROMPTS, [30, 3], strict=False)]  # fmt: skip
    list(decode(engine.verifier, engine._drafter(drafter, None, 2), rows, engine.graphs))
    assert [row.token_ids for row in rows] == answers_alone("llama", [30, 3])
    assert len(graphs._steps) == 2
    assert graphs._steps[-1].num_slots > graphs._steps[0].num_slots
