"""A batch in a thread of its own: rows from any thread get what they get alone, whatever happens to
one of them or to the batch.
"""

import asyncio
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.batches import DRAFTERS, LONGEST, alone, drafters, engine_for, pieces_of, row_for
from support.callers import all_at_once
from support.scheduler_threads import SOON, Gate, Raises, exact, heard, stopped, threaded
from support.small_engines import build_engine
from support.tiny_models import tiny_base

from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.errors import ConfigError, DeviceMemoryError, QueueFullError
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.decode.threaded.scheduler_thread import SchedulerThread
from medusa_kit.infer.decode.threaded.submission import Submission
from medusa_kit.infer.details import TokenScore
from medusa_kit.settings.sampling import SamplingParams


def batch_of(thread: SchedulerThread) -> Batch:
    (batch,) = thread._scheduler._stepped.values()
    return batch


def free_slots(thread: SchedulerThread) -> list[int]:
    return sorted(batch_of(thread)._schedule.free)


FAMILIES = ["llama-tied", "gemma3", "gpt2"]  # the first two in C++, where it can be built
REQUEST = st.tuples(
    st.integers(1, 40), st.integers(1, LONGEST), st.sampled_from(DRAFTERS), st.booleans(),
    st.none() | st.integers(0, 4),  # cancelled after so many emissions
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    visits=st.lists(st.lists(REQUEST, min_size=1, max_size=4), min_size=2, max_size=4),
    max_rows=st.integers(1, 4),
    budget=st.none() | st.integers(1, 30),
)
def test_rows_from_several_threads_get_what_they_get_alone(
    family: str, visits: list[list[Any]], max_rows: int, budget: int | None
) -> None:
    engine = engine_for(family)
    for number, drawn in {(request[0], request[3]) for visit in visits for request in visit}:
        alone(family, number, drawn)
    shared = drafters(engine)

    def visit(number: int) -> None:
        for prompt, tokens, name, drawn, leaves in visits[number]:
            row = row_for(engine, prompt, tokens, drawn)
            submission = thread.submit(row, shared[name])
            said: list[int] = []
            for count, emission in enumerate(submission):
                if count == leaves:
                    submission.cancel()
                said += emission.tokens
            assert submission.done
            expected = exact(family, row)
            if row.finish_reason == "cancelled":
                assert leaves is not None
                expected = expected[: len(said)]
            assert said == row.token_ids == expected

    with (
        pieces_of(budget) as pause,
        SchedulerThread(Scheduler(engine.verifier, max_rows, pause, reuse_prefixes=True)) as thread,
    ):
        all_at_once(visit, len(visits))
        assert (thread.stats.running, thread.stats.reading, thread.stats.waiting) == (0, 0, 0)
    assert free_slots(thread) == list(range(max_rows))


def test_what_fails_reaches_who_asked_and_nobody_else() -> None:
    engine = engine_for("llama-tied")
    shared = drafters(engine)
    failing: Any = Raises(shared["prompt-lookup"], ZeroDivisionError("here"))
    with threaded(engine, 3) as thread:
        others = [thread.submit(row_for(engine, n, LONGEST), shared["heads"]) for n in (5, 9)]
        failed = thread.submit(row_for(engine, 17, LONGEST), failing)
        with pytest.raises(ZeroDivisionError, match="here"):
            list(failed)
        assert (failed.done, failed.request.finish_reason) == (True, "error")
        assert isinstance(failed.error, ZeroDivisionError)
        for submission in others:
            assert heard(submission) == exact("llama-tied", submission.request)
        again = thread.submit(row_for(engine, 17, LONGEST), failing)
        assert heard(again) == exact("llama-tied", again.request)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: no")],
    ids=lambda error: type(error).__name__,
)
def test_a_row_for_which_there_is_no_memory_fails_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for("gpt2")

    def full(*_: Any) -> Any:
        raise error

    with stopped(engine, 2) as (thread, first, gate):
        monkeypatch.setattr("medusa_kit.infer.tree_cache.lazy_zeros", full)
        long = thread.submit(row_for(engine, 90, LONGEST), gate)
        gate.open.set()
        with pytest.raises(DeviceMemoryError, match=r"no room for 1 sequences of up to \d+ tokens"):
            long.result()
        assert heard(first) == exact("gpt2", first.request)


def test_an_error_that_is_nobody_s_ends_the_rows_and_not_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_for("gpt2")
    drafter = drafters(engine)["none"]
    with threaded(engine) as thread:
        with monkeypatch.context() as patch:
            patch.setattr(batch_of(thread), "_verify_trees", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                thread.submit(row_for(engine, 5, LONGEST), drafter).result()
        row = thread.submit(row_for(engine, 5, LONGEST), drafter).result()
    assert row.token_ids == exact("gpt2", row)


def test_a_full_queue_refuses_more_until_there_is_room() -> None:
    engine = engine_for("llama-tied")
    with stopped(engine, 1, most_waiting=2) as (thread, first, gate):
        waiting = [thread.submit(row_for(engine, n, 3), gate) for n in (4, 7)]
        with pytest.raises(QueueFullError, match="has 3 requests; expected at most 3"):
            thread.submit(row_for(engine, 9, 3), gate)
        stats = thread.stats
        assert stats.running + stats.reading + stats.waiting == 3
        gate.open.set()
        for submission in (first, *waiting):
            assert heard(submission) == exact("llama-tied", submission.request)
        again = thread.submit(row_for(engine, 9, 3), gate)
        assert heard(again) == exact("llama-tied", again.request)


def test_a_row_is_submitted_once() -> None:
    engine = engine_for("llama-tied")
    with stopped(engine, 1) as (thread, first, gate):
        with pytest.raises(ConfigError, match="in the batch already"):
            thread.submit(first.request, gate)
        gate.open.set()
        assert heard(first) == exact("llama-tied", first.request)


@pytest.mark.parametrize("where", ["waits", "reads", "runs"])
def test_a_row_is_cancelled_wherever_it_is(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("llama-tied")
    scheduler = Scheduler(engine.verifier, 2, 1e-9, reuse_prefixes=True)
    gate = Gate(drafters(engine)["heads"])
    read, reading, go_on = engine.verifier.read_prompts, threading.Event(), threading.Event()
    long, short = row_for(engine, 40, LONGEST), row_for(engine, 7, LONGEST)

    def reads_on(cache: Any, places: Any, pieces: Any, seen: Any = None) -> Any:
        if where == "reads" and pieces[0] == long.prompt_ids[16:32]:
            reading.set()
            assert go_on.wait(SOON)
        return read(cache, places, pieces, seen)

    monkeypatch.setattr(engine.verifier, "read_prompts", reads_on)
    with SchedulerThread(scheduler) as thread:
        runs = thread.submit(row_for(engine, 5, LONGEST), gate)
        assert gate.reached.wait(SOON)
        reads, waits = (thread.submit(row, gate) for row in (long, short))
        submissions = {"waits": waits, "reads": reads, "runs": runs}
        if where == "reads":
            gate.open.set()
            assert reading.wait(SOON)
        submissions[where].cancel()
        go_on.set()
        gate.open.set()
        assert submissions[where].wait(SOON)
        cancelled = submissions.pop(where).result()
        assert cancelled.finish_reason == "cancelled"
        assert where == "runs" or not cancelled.token_ids
        for submission in submissions.values():
            assert heard(submission) == exact("llama-tied", submission.request)
        last = thread.submit(row_for(engine, 9, LONGEST), gate)
        assert heard(last) == exact("llama-tied", last.request)
    assert free_slots(thread) == [0, 1]


def test_a_hook_hears_what_iterating_does_then_the_end() -> None:
    engine = engine_for("llama-tied")
    shared = drafters(engine)

    async def ask(thread: SchedulerThread, prompt: int) -> list[list[int]]:
        loop, news = asyncio.get_running_loop(), asyncio.Queue[list[int]]()
        row = row_for(engine, prompt, LONGEST)
        submission = thread.submit(
            row,
            shared["heads"],
            lambda tokens: void(loop.call_soon_threadsafe(news.put_nowait, tokens)),
        )
        got = [await news.get()]
        while got[-1]:
            got.append(await news.get())
        assert submission.done
        assert [emission.tokens for emission in submission] == got[:-1]
        return got

    def void(_: object) -> None: ...

    async def both(thread: SchedulerThread) -> list[list[list[int]]]:
        return await asyncio.gather(*(ask(thread, prompt) for prompt in (5, 9)))

    with threaded(engine) as thread:
        for prompt, got in zip((5, 9), asyncio.run(both(thread)), strict=True):
            assert [token for step in got for token in step] == alone("llama-tied", prompt, False)


def test_a_hook_that_raises_ends_its_row_and_one_that_waits_is_told() -> None:
    engine = engine_for("llama-tied")
    drafter = drafters(engine)["none"]
    found: list[Exception] = []
    mine: list[Submission] = []
    ready = threading.Event()

    def raises(tokens: list[int]) -> None:
        if tokens:
            raise RuntimeError("the loop is closed")

    def waits(_: list[int]) -> None:
        assert ready.wait(SOON)
        try:
            mine[0].wait()
        except Exception as error:
            found.append(error)

    with threaded(engine) as thread:
        with pytest.raises(RuntimeError, match="loop is closed"):
            thread.submit(row_for(engine, 5, LONGEST), drafter, raises).result()
        mine.append(thread.submit(row_for(engine, 9, 2), drafter, waits))
        ready.set()
        assert mine[0].result().token_ids == exact("llama-tied", mine[0].request)
    assert isinstance(found[0], ConfigError)


def test_a_meter_can_be_read() -> None:
    engine = engine_for("llama-tied")
    with stopped(engine, 1) as (thread, first, gate):
        waiting = thread.submit(row_for(engine, 9, 3), gate)
        stats = thread.stats
        assert stats.running + stats.reading + stats.waiting == 2
        gate.open.set()
        list(first)
        list(waiting)
        stats = thread.stats
        assert (stats.running, stats.reading, stats.waiting) == (0, 0, 0)
        assert stats.steps > 0
        assert stats.nodes == drafters(engine)["heads"].num_nodes
        assert (stats.held_prefixes, stats.cached_tokens > 0) == (1, True)


def test_a_first_token_is_not_told_with_what_its_row_did_next() -> None:
    """Beside rows that run, a row's first token and its first step come from one step of the
    batch, so the row is in the state after both when they are told."""
    engine = build_engine(tiny_base("llama"))
    row = make_request(engine.verifier, [5, 6, 7], SamplingParams(), 8)
    row.first_scores, row.num_guessed = [TokenScore(-1.0, [])], 2
    row.scores = [TokenScore(-2.0, [])] * 3
    thread = SchedulerThread(Scheduler(engine.verifier, 1))
    submission = Submission(row, PlainDrafter(torch.device("cpu")), thread)
    submission.push([9])
    submission.push([1, 2, 3])
    first, second = submission.take()
    thread.close()
    assert (first.num_guessed, first.scores) == (0, row.first_scores)
    assert (second.num_guessed, second.scores) == (2, row.scores)
