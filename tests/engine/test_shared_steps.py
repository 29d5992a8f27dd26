"""Calls in several threads, streams and shared batches take part in the same steps, and begin with
what others have read; each answer is the one that it is alone.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, cast

import pytest
import torch
from support.batches import drafters, row_for
from support.callers import Words, all_at_once
from support.small_engines import endless_base, engine_with_heads, random_prompt, reusing
from support.tiny_models import tiny_base
from support.wrapped import WrappedVerifier

from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ClosedError, ConfigError
from medusa_kit.infer.cpu.binding.kernels import load_library
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.request import Emitted, make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.sampling import SamplingParams

FAMILIES = ["llama-tied", "gpt2"]  # the first in C++, where it can be built
SOON = 60.0
in_cpp = pytest.mark.skipif(load_library() is None, reason="no C++ kernels on this machine")


def engine_for(family: str) -> Engine:
    engine = engine_with_heads(tiny_base(family))
    engine.scheduler = reusing(engine.verifier)
    return engine


def endless_engine() -> Engine:
    """Whose answers end with their last token alone."""
    engine = engine_with_heads(endless_base(24))
    engine.base.tokenizer = Words()
    engine.scheduler = reusing(engine.verifier)
    return engine


def plain(engine: Engine, prompt: list[int], tokens: int, **sampling: Any) -> list[int]:
    alone = Engine(engine.verifier, engine.check, reusing(engine.verifier), engine.heads)
    answer = alone.generate(prompt, max_new_tokens=tokens, drafter="none", **sampling)
    return list(answer.token_ids)


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many requests each step has emitted something of."""
    sizes, step = list[int](), Batch.step

    def counting(batch: Batch) -> Emitted:
        emitted = step(batch)
        sizes.append(len({request for request, _ in emitted}))
        return emitted

    with patch.context() as inner:
        inner.setattr(Batch, "step", counting)
        yield sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_in_several_threads_share_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, by different drafters, one of them a list of prompts."""
    engine = engine_for(family)
    prompts = [random_prompt(8 + 3 * n, n) for n in range(4)]
    asked: list[dict[str, Any]] = [
        {"drafter": "medusa"}, {"drafter": "none", "temperature": 1.0, "seed": 3},
        {"drafter": "auto"}, {"drafter": "suffix"},
    ]  # fmt: skip
    sampling = [{k: v for k, v in one.items() if k != "drafter"} for one in asked]
    expected = [
        plain(engine, prompt, 40, **own) for prompt, own in zip(prompts, sampling, strict=True)
    ]
    first = plain(engine, prompts[0], 40)

    def ask(number: int) -> list[list[int]]:
        answers = engine.generate(
            [prompts[number], prompts[0]], max_new_tokens=40, batch_size=2, **asked[number]
        )
        return [answer.token_ids for answer in answers]

    with watched(monkeypatch) as sizes:
        found = all_at_once(ask, 4)
    assert [one[0] for one in found] == expected
    assert all(found[n][1] == first for n in (0, 2, 3))
    assert max(sizes) > 2, "no step had requests of two calls"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_batch_and_calls_beside_it_share_steps(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(family)
    prompts = [random_prompt(9 + n, n) for n in range(3)]
    expected = [plain(engine, prompt, 48) for prompt in prompts]
    with engine.shared_batch(max_rows=2) as shared, watched(monkeypatch) as sizes:

        def ask(number: int) -> list[int]:
            if number:
                submit = shared.submit(prompts[number], max_new_tokens=48, drafter="medusa")
                return submit.result().token_ids
            return list(engine.generate(prompts[0], max_new_tokens=48).token_ids)

        assert all_at_once(ask, 3) == expected
        assert max(sizes) == 3
        (batch,) = engine.scheduler.batches.used
        assert len(batch.cache.lengths) == 3  # a slot for each that there may be at once


@in_cpp
def test_what_one_has_read_another_begins_with() -> None:
    engine, prompt = engine_for("llama-tied"), random_prompt(30, 1)
    with engine.shared_batch(max_rows=2) as shared:
        shared.generate(prompt, max_new_tokens=4)
        assert engine.generate(prompt, max_new_tokens=4).stats.cached_tokens == 29
        other = random_prompt(40, 2)
        engine.generate(other, max_new_tokens=4)
        assert shared.generate(other, max_new_tokens=4).stats.cached_tokens == 39


def test_a_stream_goes_on_only_where_it_is_read() -> None:
    """Whatever others do meanwhile."""
    engine = endless_engine()
    idle = engine.stream(random_prompt(7, 1, 24), max_new_tokens=60, drafter="none")
    next(idle)
    read = len(idle.result.token_ids)
    prompt = random_prompt(9, 2, 24)
    for _ in range(2):
        answer = engine.generate(prompt, max_new_tokens=30, drafter="none")
        assert answer.token_ids == plain(engine, prompt, 30)
        assert len(idle.result.token_ids) == read
    list(idle)
    assert idle.result.token_ids == plain(engine, random_prompt(7, 1, 24), 60)


def test_streams_that_are_read_in_turn_get_what_they_get_alone() -> None:
    engine = endless_engine()
    prompts = [random_prompt(7 + n, n, 24) for n in range(3)]
    streams = [engine.stream(prompt, max_new_tokens=24, drafter="none") for prompt in prompts]
    for _ in zip(*streams, strict=False):
        pass
    for stream in streams:
        list(stream)
    assert [one.result.token_ids for one in streams] == [plain(engine, one, 24) for one in prompts]


def test_a_request_is_left_between_two_pieces_of_its_prompt() -> None:
    """As Ctrl-C leaves it: without a wait for the rest of a long prompt."""
    engine, read = engine_for("gpt2"), list[int]()

    def reads(original: Any, cache: Any, slots: Any, pieces: Any, seen: Any = None) -> Any:
        read.extend(len(piece) for piece in pieces)
        engine.scheduler.thread.hand(lambda: engine.scheduler.batches.leave(row.caller))
        return original(cache, slots, pieces, seen)

    verifier: Any = WrappedVerifier(engine.verifier, read_prompts=reads, prompt_chunk=lambda *_: 8)
    engine.scheduler = Scheduler(verifier)
    row = make_request(verifier, random_prompt(40, 1), SamplingParams(), 8)
    engine.scheduler.decode([row], drafters(engine)["none"])
    assert (row.finish_reason, row.token_ids, read) == ("cancelled", [], [8])


def test_more_prompts_than_a_call_has_rows_wait_for_its_own() -> None:
    """A caller's limit holds beside others."""
    engine = engine_for("llama-tied")
    drafter = drafters(engine)["none"]
    rows = [row_for(engine, n, 8) for n in range(4, 9)]
    beside = engine.scheduler.run([row_for(engine, 20, 14)], drafter)
    next(beside)
    for emitted in engine.scheduler.run(rows, drafter, 2):
        assert len({row for row, _ in emitted}) <= 2
    assert [row.token_ids for row in rows] == [plain(engine, row.prompt_ids, 8) for row in rows]
    list(beside)


def test_autocast_is_of_the_thread_that_asked_for_it() -> None:
    """Whoever makes a step of its answer makes it under that, and one beside it without; what was
    read so is its own."""
    engine = engine_for("gpt2")
    drafter, prompts = drafters(engine)["none"], [random_prompt(9 + n, n) for n in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = plain(engine, prompts[0], 14)
    expected = plain(engine, prompts[1], 14)
    rows = [make_request(engine.verifier, ids, SamplingParams(), 14) for ids in prompts]
    with torch.autocast("cpu", torch.bfloat16):
        under = engine.scheduler.run([rows[0]], drafter)
        next(under)
    list(engine.scheduler.run([rows[1]], drafter))
    list(under)
    assert [row.token_ids for row in rows] == [rounded, expected]


@pytest.mark.parametrize("first", [False, True])
def test_an_answer_goes_on_as_it_began_whatever_autocast_is_on(first: bool) -> None:
    engine, prompt = engine_for("gpt2"), random_prompt(9, 1)
    row = make_request(engine.verifier, prompt, SamplingParams(), 14)
    with torch.autocast("cpu", torch.bfloat16, enabled=first):
        expected = plain(engine, prompt, 14)
        steps = engine.scheduler.run([row], drafters(engine)["none"])
        next(steps)
        with engine.shared_batch(max_rows=1) as shared:
            assert shared.generate(prompt, max_new_tokens=14).token_ids == expected
    with torch.autocast("cpu", torch.bfloat16, enabled=not first):
        list(steps)
    assert row.token_ids == expected


def test_what_was_read_under_autocast_is_gone_on_from_under_autocast_alone() -> None:
    engine, prompt = engine_for("gpt2"), random_prompt(30, 1)
    read = list[int]()
    for under in (False, False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=under):
            answer = engine.generate(prompt, max_new_tokens=14)
            assert answer.token_ids == plain(engine, prompt, 14)
        read.append(answer.stats.cached_tokens)
    assert read == [0, 29, 0, 29, 29]


def test_what_a_shared_batch_prepares_it_prepares_under_the_autocast_of_its_thread() -> None:
    engine, seen = engine_for("gpt2"), list[bool]()

    def prepare(*_: Any) -> None:
        seen.append(torch.is_autocast_enabled("cpu"))

    engine.scheduler = Scheduler(cast("Any", WrappedVerifier(engine.verifier, prepare=prepare)))
    for under in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=under), engine.shared_batch():
            pass
    assert seen == [True, False]


def test_steps_use_as_many_threads_as_whoever_asked_last() -> None:
    engine, used, before = engine_for("gpt2"), list[int](), torch.get_num_threads()
    note: Any = lambda *_: used.append(torch.get_num_threads())  # noqa: E731
    prompt = random_prompt(9, 1)
    try:
        torch.set_num_threads(2)
        with engine.shared_batch() as shared:
            torch.set_num_threads(1)
            for _ in range(2):
                engine.generate(prompt, max_new_tokens=2)
                shared.submit(prompt, max_new_tokens=1, on_tokens=note).result()
    finally:
        torch.set_num_threads(before)
    assert set(used) == {2}


def test_one_that_fails_ends_alone_beside_other_callers() -> None:
    engine = engine_for("llama-tied")
    drafter: Any = drafters(engine)["prompt-lookup"]
    healthy = engine.scheduler.run([row := row_for(engine, 12, 14)], drafters(engine)["none"])
    next(healthy)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("here")

    drafter.propose = broken
    with pytest.raises(ZeroDivisionError, match="here"):
        list(engine.scheduler.run([row_for(engine, n, 14) for n in (5, 9)], drafter))
    list(healthy)
    assert row.token_ids == plain(engine, row.prompt_ids, 14)
    assert not engine.scheduler.batches.used


def test_what_cuts_a_step_off_ends_all_of_its_batch_in_an_error() -> None:
    """Such as `sys.exit` in a drafter. What such a step leaves is not gone on from."""
    engine = engine_for("llama-tied")
    ends: Any = drafters(engine)["prompt-lookup"]
    other = engine.scheduler.run([row_for(engine, 12, 14)], drafters(engine)["none"])
    next(other)

    def propose(*_: Any) -> Any:
        raise SystemExit(3)

    ends.propose = propose
    with pytest.raises(ClosedError, match="ended by SystemExit: 3"):
        list(engine.scheduler.run([row_for(engine, 5, 14)], ends))
    with pytest.raises(ClosedError, match="ended by SystemExit: 3"):
        list(other)
    assert engine.generate(random_prompt(4, 1), max_new_tokens=2).token_ids


@pytest.mark.parametrize("threads", [0, 1])
def test_an_answer_within_a_step_is_refused(threads: int) -> None:
    """At once, whether or not there are other threads."""
    engine, done = engine_for("llama-tied"), Event()
    for _ in range(threads):
        Thread(target=done.wait, daemon=True).start()
    drafter: Any = drafters(engine)["none"]

    def asks(*_: Any) -> Any:
        return engine.generate(random_prompt(4, 1), max_new_tokens=2)

    drafter.observe = asks
    with pytest.raises(ConfigError, match="within a step"):
        list(engine.scheduler.run([row_for(engine, 5, 14)], drafter))
    begun = engine.scheduler.run([row_for(engine, 9, 14)], drafters(engine)["none"])
    next(begun)
    drafter.observe = lambda *_: next(begun)
    with pytest.raises(ConfigError, match="within a step"):
        list(engine.scheduler.run([row_for(engine, 5, 14)], drafter))
    done.set()
    assert engine.generate(random_prompt(4, 1), max_new_tokens=2).token_ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_goes_on_alone_while_another_thread_was_amid_a_step() -> None:
    engine = engine_for("gpt2")
    drafter: Any = drafters(engine)["none"]
    expected = plain(engine, random_prompt(9, 2), 12)
    propose, reached, go_on = drafter.propose, Event(), Event()

    def stops(state: Any) -> Any:
        reached.set()
        assert go_on.wait(SOON)
        return propose(state)

    drafter.propose = stops
    thread = Thread(target=lambda: list(engine.scheduler.run([row_for(engine, 5, 8)], drafter)))
    thread.start()
    assert reached.wait(SOON)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        answer = engine.generate(random_prompt(9, 2), max_new_tokens=12, drafter="none")
        os._exit(0 if answer.token_ids == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    thread.join(SOON)
    assert engine.generate(random_prompt(9, 2), max_new_tokens=12).token_ids == expected
