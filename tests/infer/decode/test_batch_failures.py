"""What fails in a batch ends the rows that asked for it: the others get what they get alone, no
place is lost, and what places hold is still what they are said to hold.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.batches import DRAFTERS, LONGEST, MORE_DRAFTERS, alone, drafters, engine_for, row_for

from medusa_kit.errors import DeviceMemoryError
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.request import Request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.draft import Drafter

FAMILIES = ["llama-tied", "gpt2"]  # in C++, where it can be built, and in torch
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory"
    ),
    MemoryError(),
]


class Fault(Exception):
    """Raised by the tests alone."""


class Failing:
    """A drafter that raises at the given call of a method."""

    def __init__(self, inner: Drafter, method: str, call: int) -> None:
        self._inner, self._method, self._left = inner, method, call

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == self._method:
            self._left -= 1
            if self._left == 0:
                raise Fault(name)
        return found


def served(batch: Batch, most: int = 500) -> None:
    steps = 0
    while batch.num_requests:
        batch.step()
        steps += 1
        assert steps < most, "somebody starves"


def assert_free(batch: Batch) -> None:
    """Every place is free, and holds what it is said to hold."""
    assert sorted(batch._schedule._free) == list(range(len(batch.cache.lengths)))
    assert not batch._groups
    assert not batch._drafters
    for tokens, length in zip(batch.prefixes.tokens, batch.cache.lengths, strict=True):
        assert len(tokens) <= length


def exact(family: str, row: Request) -> list[int]:
    return alone(family, len(row.prompt_ids), not row.sampler.params.greedy)[: row.max_new_tokens]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("method", "call"),
    [("begin", 1), ("begin", 2), ("propose", 1), ("propose", 2), ("observe", 2)],
)
def test_a_drafter_that_fails_ends_its_rows_alone(family: str, method: str, call: int) -> None:
    engine = engine_for(family)
    failing: Any = Failing(drafters(engine)["prompt-lookup"], method, call)
    batch, other = Batch(engine.verifier, 4), drafters(engine)["heads"]
    others = [row_for(engine, n, LONGEST) for n in (5, 17)]
    theirs = [row_for(engine, n, 4 + n) for n in (2, 9)]
    for row, drafter in zip([*others, *theirs], [other, other, failing, failing], strict=True):
        batch.add(row, drafter)
    served(batch)
    for row in others:
        assert row.token_ids == exact(family, row)
    failed = [row for row in theirs if row.error is not None]
    assert failed
    for row in failed:
        assert isinstance(row.error, Fault)
        assert (row.finish_reason, row.is_complete) == ("error", False)
        assert row.token_ids == exact(family, row)[: len(row.token_ids)]
    assert_free(batch)
    again = row_for(engine, 9, LONGEST)  # the drafter has forgotten what it was in the middle of
    batch.add(again, failing)
    served(batch)
    assert again.token_ids == exact(family, again)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("part", ["the first token", "a later token", "a stop string"])
def test_a_row_that_fails_leaves_alone(part: str, drawn: bool) -> None:
    engine = engine_for("llama-tied")
    batch, shared = Batch(engine.verifier, 3), drafters(engine)["heads"]
    rows = [row_for(engine, n, LONGEST, drawn) for n in (5, 17, 9)]

    class Raises:
        def __init__(self, after: int) -> None:
            self.after = after

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] >= self.after:
                raise Fault("processor")
            return scores

        def push(self, token: int) -> bool:
            raise Fault("stop string")

    if part == "a stop string":
        rows[1].stop_strings = Raises(0)  # type: ignore[assignment]
    else:
        raising = [Raises(17 + 3 * (part == "a later token"))]
        rows[1].sampler._processors = rows[1].sampler._before_warpers = raising
    for row in rows:
        batch.add(row, shared)
    served(batch)
    assert isinstance(rows[1].error, Fault)
    assert rows[1].token_ids[:1] == exact("llama-tied", rows[1])[: len(rows[1].token_ids[:1])]
    for row in (rows[0], rows[2]):
        assert row.token_ids == exact("llama-tied", row)
    assert_free(batch)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "error", [Fault("forward"), *OUT_OF_MEMORY], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("method", ["score", "read_prompts"])
@pytest.mark.parametrize("when", ["before its work", "after it"])
def test_a_forward_that_fails_together_is_run_for_each_row(
    family: str, method: str, when: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(family)
    original = getattr(engine.verifier, method)
    places: list[int] = []

    def limited(cache: Any, *work: Any) -> Any:
        rows = next(one for one in work if isinstance(one, list) and isinstance(one[0], int))
        places.append(len(rows))
        if len(rows) > 1:
            if when == "after it":
                original(cache, *work)
            raise error
        return original(cache, *work)

    monkeypatch.setattr(engine.verifier, method, limited)
    monkeypatch.setattr(engine.verifier, "prompt_chunk", lambda rows: 64)
    batch, shared = Batch(engine.verifier, 3), drafters(engine)
    rows = [row_for(engine, n, LONGEST, n == 9) for n in (5, 17, 9)]
    for row, name in zip(rows, ("heads", "heads", "suffix"), strict=True):
        batch.add(row, shared[name])
    served(batch)
    assert max(places) > 1
    for row in rows:
        assert (row.error, row.token_ids) == (None, exact(family, row))
    assert_free(batch)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "error", [Fault("forward"), *OUT_OF_MEMORY], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("method", ["score", "read_prompts"])
def test_a_row_that_cannot_be_run_alone_fails_alone(
    family: str, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(family)
    original = getattr(engine.verifier, method)

    def limited(cache: Any, *work: Any) -> Any:
        rows = next(one for one in work if isinstance(one, list) and isinstance(one[0], int))
        if 1 in rows:
            raise error
        return original(cache, *work)

    monkeypatch.setattr(engine.verifier, method, limited)
    monkeypatch.setattr(engine.verifier, "prompt_chunk", lambda rows: 64)
    batch, shared = Batch(engine.verifier, 3), drafters(engine)
    rows = [row_for(engine, n, LONGEST) for n in (5, 17, 9)]
    for row, name in zip(rows, DRAFTERS, strict=False):
        batch.add(row, shared[name])
    served(batch)
    assert [row.error for row in rows] == [None, error, None]
    for row in (rows[0], rows[2]):
        assert row.token_ids == exact(family, row)
    assert_free(batch)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: type(e).__name__)
def test_no_room_for_a_longer_row_leaves_the_batch_as_it_was(
    family: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(family)
    batch, drafter = Batch(engine.verifier, 2), drafters(engine)["heads"]
    first, long, second = (row_for(engine, n, LONGEST) for n in (5, 40, 4))
    batch.add(first, drafter)
    batch.step()

    def full(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("medusa_kit.infer.tree_cache.lazy_zeros", full)
        slots = batch.cache.num_positions
        with pytest.raises(type(error)):
            batch.add(long, drafter)
        assert batch.cache.num_positions == slots
        batch.add(second, drafter)  # which has room
    served(batch)
    for row in (first, second):
        assert row.token_ids == exact(family, row)
    assert_free(batch)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: type(e).__name__)
def test_a_call_of_its_own_says_what_memory_lacks(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` raises what a row failed of, with sizes where memory was too small."""
    engine = engine_for("gpt2")

    def full(*_: Any, **__: Any) -> Any:
        raise error

    rows = [row_for(engine, n, LONGEST) for n in (5, 9)]
    monkeypatch.setattr(engine.verifier, "score", full)
    with pytest.raises(DeviceMemoryError, match="no room for 2"):
        list(Scheduler(engine.verifier).run(rows, drafters(engine)["heads"]))


SITES = ["score", "read_prompts", "commit", "copy_first", "begin", "propose", "observe", "finish"]
DONE_FIRST = ("score", "read_prompts", "copy_first", "begin", "finish")


@contextmanager
def faults(batch: Batch, shared: dict[str, Any], plan: dict[str, set[int]]) -> Iterator[None]:
    """Let these calls of the methods fail, half of them when their work has been done."""
    objects: dict[str, list[Any]] = {
        **{name: [batch.verifier] for name in SITES[:2]},
        **{name: [batch.cache] for name in SITES[2:4]},
        **{name: list(shared.values()) for name in SITES[4:]},
    }
    calls = dict.fromkeys(SITES, 0)

    def failing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if calls[name] in plan.get(name, ()):
                if calls[name] % 2 and name in DONE_FIRST:
                    original(*args, **kwargs)
                raise Fault(name)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, owners in objects.items():
            for owner in owners:
                patch.setattr(owner, name, failing(name, getattr(owner, name)))
        yield


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    plan=st.dictionaries(st.sampled_from(SITES), st.sets(st.integers(1, 12), max_size=3)),
    requests=st.lists(
        st.tuples(
            st.sampled_from([3, 20, 21, 33]), st.integers(1, LONGEST),
            st.sampled_from(MORE_DRAFTERS), st.booleans(),
        ),
        min_size=2, max_size=7,
    ),
    max_rows=st.integers(1, 3),
)  # fmt: skip
def test_whatever_fails_rows_are_exact_or_fail(
    family: str,
    plan: dict[str, set[int]],
    requests: list[tuple[int, int, str, bool]],
    max_rows: int,
) -> None:
    engine = engine_for(family)
    shared, batch = drafters(engine), Batch(engine.verifier, max_rows)
    rows = [row_for(engine, prompt, tokens, drawn) for prompt, tokens, _, drawn in requests]
    with faults(batch, shared, plan):
        for row, (_, _, name, _) in zip(rows, requests, strict=True):
            batch.add(row, shared[name])
        served(batch)
    for row in rows:
        expected = exact(family, row)
        if row.error is not None:
            assert isinstance(row.error, Fault)
            assert plan
            expected = expected[: len(row.token_ids)]
        assert row.token_ids == expected
    assert_free(batch)
    again = [row_for(engine, prompt, LONGEST) for prompt in (3, 20, 21, 33)]
    for row in again:  # by the prefixes that are left
        batch.add(row, shared["heads"])
    served(batch)
    for row in again:
        assert row.token_ids == exact(family, row)
