"""A scheduler in a thread of its own: requests from any thread get what they get alone, whatever
happens to one of them. Where the thread is closed, dies or loses its device, nobody waits for ever.
"""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.batches import (
    DRAFTERS,
    LONGEST,
    Serving,
    alone,
    check_slots,
    drafters,
    engine_for,
    exact,
    pieces_of,
    row_for,
)
from support.callers import all_at_once
from support.request_queues import SOON, Gate, Raises, heard, stopped, threaded
from support.wrapped import Wrapped, WrappedVerifier, raising

from medusa_kit.errors import ClosedError, ConfigError, DeviceMemoryError, QueueFullError
from medusa_kit.infer.decode.scheduler import KEPT_BYTES, Scheduler
from medusa_kit.infer.decode.threaded.request_queue import RequestQueue
from medusa_kit.infer.decode.threaded.submission import Submission
from medusa_kit.infer.details import TokenScore

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
def test_requests_from_several_threads_get_what_they_get_alone(
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

    with pieces_of(budget) as pause:
        scheduler = Scheduler(engine.verifier, reuse_prefixes=True, kept_bytes=KEPT_BYTES)
        with RequestQueue(scheduler, max_rows, pause) as thread:
            all_at_once(visit, len(visits))
            stats = thread.stats
            assert (stats.running, stats.reading, stats.waiting) == (0, 0, 0)
    check_slots(Serving.of(scheduler.batches, max_rows), family, [visit[0][0] for visit in visits])


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
def test_a_request_for_which_there_is_no_memory_fails_alone(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_for("gpt2")

    def new_cache(original: Any, *sizes: int) -> Any:
        cache = original(*sizes)
        vars(cache)["grow"] = raising(error)
        return cache

    verifier = WrappedVerifier(engine.verifier, new_cache=new_cache, positions_for=lambda *_: 40)
    with stopped(engine, 2, verifier=verifier) as (thread, first, gate):
        long = thread.submit(row_for(engine, 90, LONGEST, verifier=verifier), gate)
        gate.open.set()
        with pytest.raises(DeviceMemoryError, match=r"no room for 1 sequences of up to \d+ tokens"):
            long.result()
        assert heard(first) == exact("gpt2", first.request)
    thread._scheduler.thread.hand_and_wait(lambda: None)
    assert "has ended" not in capsys.readouterr().err  # nor has the thread that makes steps


def test_an_error_that_is_nobody_s_ends_the_requests_and_not_the_thread() -> None:
    engine, broken = engine_for("gpt2"), [True]

    def fitted(original: Any, draft: Any) -> Any:
        if broken:
            raise ZeroDivisionError
        return original(draft)

    verifier, drafter = WrappedVerifier(engine.verifier, fitted=fitted), drafters(engine)["none"]
    with threaded(engine, verifier=verifier) as thread:
        first, second = (row_for(engine, 5, LONGEST, verifier=verifier) for _ in range(2))
        with pytest.raises(ZeroDivisionError):
            thread.submit(first, drafter).result()
        broken.clear()
        assert thread.submit(second, drafter).result().token_ids == exact("gpt2", second)


def test_what_is_too_much_or_there_already_is_refused() -> None:
    engine = engine_for("llama-tied")
    with stopped(engine, 1, most_waiting=2) as (thread, first, gate):
        second = thread.submit(row_for(engine, 4, 3), gate)
        with pytest.raises(ConfigError, match="in the batch already"):
            thread.submit(first.request, gate)
        third = thread.submit(row_for(engine, 7, 3), gate)
        with pytest.raises(QueueFullError, match="has 3 requests; expected at most 3"):
            thread.submit(row_for(engine, 9, 3), gate)
        stats = thread.stats
        assert stats.running + stats.reading + stats.waiting == 3
        gate.open.set()
        for submission in (first, second, third):
            assert heard(submission) == exact("llama-tied", submission.request)
        again = thread.submit(row_for(engine, 9, 3), gate)
        assert heard(again) == exact("llama-tied", again.request)
        stats = thread.stats
        assert (stats.running, stats.reading, stats.waiting) == (0, 0, 0)
        assert stats.steps > 0
        assert stats.nodes == drafters(engine)["heads"].num_nodes
        assert (stats.held_prefixes, stats.cached_tokens > 0) == (1, True)


@pytest.mark.parametrize("where", ["waits", "reads", "runs"])
def test_a_request_is_cancelled_wherever_it_is(where: str) -> None:
    engine = engine_for("llama-tied")
    reading, go_on = threading.Event(), threading.Event()

    def reads_on(read: Any, cache: Any, slots: Any, pieces: Any, seen: Any = None) -> Any:
        if where == "reads" and pieces[0] == long.prompt_ids[16:32]:
            reading.set()
            assert go_on.wait(SOON)
        return read(cache, slots, pieces, seen)

    verifier: Any = WrappedVerifier(engine.verifier, read_prompts=reads_on)
    first, long, short, last = (
        row_for(engine, n, LONGEST, verifier=verifier) for n in (5, 40, 7, 9)
    )
    scheduler = Scheduler(verifier, reuse_prefixes=True, kept_bytes=KEPT_BYTES)
    gate: Any = Gate(drafters(engine)["heads"])
    with RequestQueue(scheduler, 2, 1e-9) as thread:
        runs = thread.submit(first, gate)
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
        assert heard(thread.submit(last, gate)) == exact("llama-tied", last)
    check_slots(Serving.of(scheduler.batches, 2), "llama-tied", [5, 9])


def test_a_hook_hears_what_iterating_does_then_the_end() -> None:
    engine = engine_for("llama-tied")
    shared = drafters(engine)

    async def ask(thread: RequestQueue, prompt: int) -> list[list[int]]:
        loop, news = asyncio.get_running_loop(), asyncio.Queue[list[int]]()

        def pass_on(tokens: list[int]) -> None:
            loop.call_soon_threadsafe(news.put_nowait, tokens)

        submission = thread.submit(row_for(engine, prompt, LONGEST), shared["heads"], pass_on)
        got = [await news.get()]
        while got[-1]:
            got.append(await news.get())
        assert submission.done
        assert [emission.tokens for emission in submission] == got[:-1]
        return got

    async def both(thread: RequestQueue) -> list[list[list[int]]]:
        return await asyncio.gather(*(ask(thread, prompt) for prompt in (5, 9)))

    with threaded(engine) as thread:
        for prompt, got in zip((5, 9), asyncio.run(both(thread)), strict=True):
            assert [token for step in got for token in step] == alone("llama-tied", prompt, False)


def test_a_hook_that_raises_ends_its_request_and_one_that_waits_is_told() -> None:
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


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt()], ids=repr)
def test_a_hook_that_raises_what_ends_threads_ends_its_request_alone(
    error: BaseException, at_end: bool
) -> None:
    engine = engine_for("llama-tied")
    drafter = drafters(engine)["none"]

    def raises(tokens: list[int]) -> None:
        if tokens or at_end:
            raise error

    with threaded(engine, 3) as thread:
        other = thread.submit(row_for(engine, 9, LONGEST), drafter)
        submission = thread.submit(row_for(engine, 5, LONGEST), drafter, raises)
        assert submission.wait(SOON)
        with pytest.raises(ClosedError, match=f"on_tokens was ended by {type(error).__name__}"):
            submission.result()
        assert other.wait(SOON)
        assert other.result().token_ids == exact("llama-tied", other.request)


def test_a_first_token_is_not_told_with_what_its_request_did_next() -> None:
    """Beside requests that run, a first token and a first step come from one step of the batch, so
    the request is in the state after both when they are told."""
    engine = engine_for("llama-tied")
    row, thread = row_for(engine, 3, 8), SimpleNamespace(is_current=False)
    row.first_scores, row.num_guessed = [TokenScore(-1.0, [])], 2
    row.scores = [TokenScore(-2.0, [])] * 3
    submission = Submission(row, drafters(engine)["none"], thread)  # type: ignore[arg-type]
    submission.push([9])
    submission.push([1, 2, 3])
    first, second = submission.take()
    assert (first.num_guessed, first.scores) == (0, row.first_scores)
    assert (second.num_guessed, second.scores) == (2, row.scores)


@pytest.mark.parametrize("drain", [True, False])
def test_closing_ends_every_request(drain: bool) -> None:
    engine = engine_for("llama-tied")
    with stopped(engine, 1) as (thread, first, gate):
        second = thread.submit(row_for(engine, 9, LONGEST), gate)
        thread.close(drain=drain, timeout=0)  # as far as the gate lets it
        with pytest.raises(ClosedError, match="has been closed"):
            thread.submit(row_for(engine, 4, 2), gate)
        gate.open.set()
        thread.close(drain=drain)
        for submission in (first, second):
            assert submission.done
            said, expected = heard(submission), exact("llama-tied", submission.request)
            assert said == expected[: len(said)]
            assert submission.request.is_complete == drain
            assert not drain or said == expected
        thread.close()


def test_what_ends_a_step_leaves_nobody_waiting() -> None:
    """Such as `sys.exit` in a drafter: the batch is lost, others get a new one."""
    engine = engine_for("gpt2")
    ends: Any = Raises(drafters(engine)["none"], SystemExit(1))
    with threaded(engine, 2) as thread:
        with pytest.raises(ClosedError, match="ended by SystemExit"):
            thread.submit(row_for(engine, 5, LONGEST), ends).result()
        again = thread.submit(row_for(engine, 5, LONGEST), drafters(engine)["heads"])
        assert heard(again) == exact("gpt2", again.request)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_told_that_it_has_no_thread() -> None:
    engine = engine_for("gpt2")
    with stopped(engine) as (thread, first, gate):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            refused = 0
            asks = [first.result, lambda: list(first), lambda: thread.submit(first.request, gate)]
            for ask in asks:
                try:
                    ask()
                except ClosedError:
                    refused += 1
            thread.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        gate.open.set()
        assert heard(first) == exact("gpt2", first.request)


EXIT = """
    import sys, threading
    sys.path[:0] = {paths!r}
    from support.batches import drafters, engine_for, row_for
    from support.request_queues import threaded

    engine = engine_for("llama-tied")
    thread = threaded(engine, 1)
    rows = [row_for(engine, n, 200) for n in (5, 9)]
    kept = [thread.submit(row, drafters(engine)["none"]) for row in rows]
    next(iter(kept[0]))
    print("at the end")
"""
# Answers in threads that end with the process, each amid one: what a step waits for is there last.
DAEMONS = """
    import sys, threading, time
    sys.path[:0] = {paths!r}
    from support.small_engines import engine_with_heads, random_prompt
    from medusa_kit.infer.decode.batch import Batch

    engine = engine_with_heads()
    batch = engine.shared_batch(2)
    step, begun = Batch.step, threading.Event()

    def waits(one):
        while one.num_requests < 3:
            time.sleep(0.01)
            if engine.scheduler.thread.is_asked:
                return []
        begun.set()
        time.sleep(0.1)
        return step(one)

    Batch.step = waits
    asks = [
        lambda: engine.generate(random_prompt(5, 1), max_new_tokens=60),
        lambda: list(engine.stream(random_prompt(6, 1), max_new_tokens=60)),
        lambda: batch.generate(random_prompt(7, 1), max_new_tokens=60),
    ]
    for ask in asks:
        threading.Thread(target=ask, daemon=True).start()
    begun.wait()
    print("at the end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [EXIT, DAEMONS], ids=["answers left", "daemons"])
def test_a_process_may_end_while_requests_run(code: str) -> None:
    tests = Path(__file__).parents[3]
    code = textwrap.dedent(code.format(paths=[str(tests), str(tests.parent)]))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON * 2, check=False
    )
    assert (done.returncode, done.stdout) == (0, "at the end\n"), done.stderr
    assert "Error" not in done.stderr


def test_a_thread_that_cannot_be_made_leaves_nothing_behind() -> None:
    engine = engine_for("gpt2")
    scheduler = Scheduler(WrappedVerifier(engine.verifier, prepare=raising(OSError("no room"))))
    with pytest.raises(OSError, match="no room"):
        RequestQueue(scheduler, 2)
    assert not scheduler.idle  # asked of the thread, which then has made the calls before
    assert not scheduler.batches.used


@pytest.mark.parametrize("handed", [False, True])
def test_a_request_that_could_not_be_handed_over_leaves_nothing_behind(
    handed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread can be started, or Ctrl-C comes before or after."""
    engine = engine_for("gpt2")
    drafter, told, ended = drafters(engine)["none"], list[list[int]](), list[bool]()
    with threaded(engine, 2, most_waiting=0) as thread:
        steps = thread._scheduler.thread
        hand = steps.hand

        def cut_off(call: Any) -> None:
            if handed:
                hand(call)
            raise KeyboardInterrupt

        for _ in range(3):  # more than may be there at once
            row = row_for(engine, 5, LONGEST)
            with monkeypatch.context() as patch:
                patch.setattr(steps, "hand", cut_off)
                with pytest.raises(KeyboardInterrupt):
                    thread.submit(row, drafter, told.append, lambda: ended.append(True))
            steps.hand_and_wait(lambda: None)
        again = thread.submit(row_for(engine, 9, LONGEST), drafter)
        assert heard(again) == exact("gpt2", again.request)
        thread.close(timeout=SOON)
        assert thread._ended.is_set()
    assert [] not in told
    assert not ended


def test_no_call_is_left_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("gpt2")
    scheduler = Scheduler(engine.verifier)

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(ClosedError, match="no thread can be started"):
            scheduler.thread.hand(lambda: calls.append(1))
    scheduler.thread.hand_and_wait(lambda: calls.append(2))
    assert calls == [2]


def test_two_threads_never_make_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ctrl-C comes as one is started, another one is."""
    engine = engine_for("gpt2")
    scheduler = Scheduler(engine.verifier)
    steps, names = scheduler.thread, list[str]()
    steps.hand_and_wait(lambda: None)
    first = steps._thread
    assert first is not None
    with monkeypatch.context() as patch:
        patch.setattr(first, "is_alive", lambda: False)
        for _ in range(20):
            steps.hand_and_wait(lambda: names.append(threading.current_thread().ident))
    first.join(SOON)
    assert not first.is_alive()
    assert set(names) == {steps._thread.ident}


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()], ids=repr)
def test_a_drafter_that_is_ended_as_it_hears_of_the_end_leaves_nobody_waiting(
    error: BaseException,
) -> None:
    engine = engine_for("gpt2")
    drafter: Any = Wrapped(drafters(engine)["none"])
    drafter.finish = raising(error)
    with threaded(engine, 3) as thread:
        other = thread.submit(row_for(engine, 9, LONGEST), drafters(engine)["none"])
        submission = thread.submit(row_for(engine, 5, 4), drafter)
        for one in (submission, other):
            assert one.wait(SOON)
            with pytest.raises(ClosedError, match="a step was ended by"):
                one.result()
        again = thread.submit(row_for(engine, 5, LONGEST), drafters(engine)["heads"])
        assert heard(again) == exact("gpt2", again.request)
