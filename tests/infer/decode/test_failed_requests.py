"""What fails ends the requests that asked for it: those beside them get what they get alone, no
slot is lost, and what slots cache is still what they are said to cache.
"""

from typing import Any

import pytest
import torch
from support.batches import (
    LONGEST,
    Serving,
    check_slots,
    drafters,
    engine_for,
    exact,
    row_for,
    served,
)
from support.full_memory import Full
from support.wrapped import Wrapped, WrappedVerifier, raising

from medusa_kit.errors import DeviceMemoryError
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.scheduler import Scheduler

FAMILIES = ["llama-tied", "gpt2"]  # in C++, where it can be built, and in torch
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory"
    ),
    MemoryError(),
]
by_type = {"ids": lambda error: type(error).__name__}


class Fault(Exception):
    """Raised by the tests alone."""


@pytest.mark.parametrize(
    ("method", "call"),
    [("begin", 1), ("begin", 2), ("propose", 1), ("propose", 2), ("observe", 2)],
)
def test_a_drafter_that_fails_ends_its_requests_alone(method: str, call: int) -> None:
    engine, calls = engine_for("llama-tied"), 0

    def fails(original: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Fault(method)
        return original(*args)

    failing: Any = Wrapped(drafters(engine)["prompt-lookup"], **{method: fails})
    scheduler, other = Serving(engine.verifier, 4), drafters(engine)["heads"]
    others = [row_for(engine, n, LONGEST) for n in (5, 17)]
    theirs = [row_for(engine, n, 4 + n) for n in (2, 9)]
    for row, drafter in zip([*others, *theirs], [other, other, failing, failing], strict=True):
        scheduler.add(row, drafter)
    served(scheduler, [*others, *theirs])
    for row in others:
        assert row.token_ids == exact("llama-tied", row)
    failed = [row for row in theirs if row.error is not None]
    # The first of them begins alone; the others share what has failed.
    assert len(failed) == (1 if (method, call) == ("begin", 1) else 2)
    for row in failed:
        assert isinstance(row.error, Fault)
        assert (row.finish_reason, row.is_complete) == ("error", False)
        assert row.token_ids == exact("llama-tied", row)[: len(row.token_ids)]
    again = row_for(engine, 9, LONGEST)  # the drafter has forgotten what it was in the middle of
    scheduler.add(again, failing)
    served(scheduler, [again])
    assert again.token_ids == exact("llama-tied", again)
    check_slots(scheduler, "llama-tied", [5, 17, 2, 9])


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("part", ["the first token", "a later token", "a stop string"])
def test_a_request_that_fails_leaves_alone(part: str, drawn: bool) -> None:
    engine = engine_for("llama-tied")
    scheduler, shared = Serving(engine.verifier, 3), drafters(engine)["heads"]
    rows = [row_for(engine, n, LONGEST, drawn) for n in (5, 17, 9)]
    after = 17 + 3 * (part == "a later token")

    class Raises:
        pushed = 0

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] >= after:
                raise Fault("processor")
            return scores

        def push(self, token: int) -> bool:
            self.pushed += 1
            if self.pushed > 1:  # the first token is told elsewhere
                raise Fault("stop string")
            return False

    if part == "a stop string":
        rows[1].stop_strings = Raises()  # type: ignore[assignment]
    else:
        params, prompt = rows[1].sampler.params, rows[1].prompt_ids
        rows[1].sampler = Sampler(engine.base, params, prompt, LONGEST, processors=[Raises()])
    for row in rows:
        scheduler.add(row, shared)
    served(scheduler, rows)
    assert isinstance(rows[1].error, Fault)
    assert rows[1].token_ids[:1] == exact("llama-tied", rows[1])[: len(rows[1].token_ids[:1])]
    for row in (rows[0], rows[2]):
        assert row.token_ids == exact("llama-tied", row)
    check_slots(scheduler, "llama-tied", [5, 17, 9])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("error", [Fault("forward"), *OUT_OF_MEMORY[:2]], **by_type)
@pytest.mark.parametrize("method", ["score", "read_prompts"])
@pytest.mark.parametrize("fails", ["together", "together, after its work", "one alone"])
def test_a_forward_that_fails_is_run_for_each_request_alone(
    family: str, method: str, fails: str, error: Exception
) -> None:
    """`one alone`: that of slot 1 fails then too."""
    engine, sizes, broken = engine_for(family), list[int](), [True]

    def limited(original: Any, cache: Any, *work: Any) -> Any:
        slots = next(one for one in work if isinstance(one, list) and isinstance(one[0], int))
        sizes.append(len(slots))
        if broken and (1 in slots if fails == "one alone" else len(slots) > 1):
            if fails == "together, after its work":
                original(cache, *work)
            raise error
        return original(cache, *work)

    around: dict[str, Any] = {method: limited, "prompt_chunk": lambda _, rows: 64}
    scheduler = Serving(WrappedVerifier(engine.verifier, **around), 3)  # type: ignore[arg-type]
    shared = drafters(engine)
    rows = [row_for(engine, n, LONGEST, n == 9, scheduler.verifier) for n in (5, 17, 9)]
    for row, name in zip(rows, ("heads", "heads", "suffix"), strict=True):
        scheduler.add(row, shared[name])
    served(scheduler, rows)
    assert max(sizes) > 1
    assert [row.error for row in rows] == [None, error if fails == "one alone" else None, None]
    for row in rows:
        if row.error is None:
            assert row.token_ids == exact(family, row)
    broken.clear()
    check_slots(scheduler, family, [5, 17, 9])


@pytest.mark.parametrize("error", OUT_OF_MEMORY, **by_type)
def test_no_room_for_a_longer_request_leaves_all_as_it_was(error: Exception) -> None:
    engine = engine_for("gpt2")
    scheduler, drafter = Serving(engine.verifier, 2), drafters(engine)["heads"]
    first, long, second = (row_for(engine, n, LONGEST) for n in (5, 40, 4))
    scheduler.add(first, drafter)
    scheduler.step()
    with Full(1, error), pytest.raises(type(error)):
        scheduler.add(long, drafter)
    with Full(1, error):
        scheduler.add(second, drafter)  # which has room
    served(scheduler, [first, second])
    for row in (first, second):
        assert row.token_ids == exact("gpt2", row)
    check_slots(scheduler, "gpt2", [5, 4])


@pytest.mark.parametrize("error", OUT_OF_MEMORY, **by_type)
def test_a_run_of_its_own_says_what_memory_lacks(error: Exception) -> None:
    """`generate` raises what a request failed of, with sizes where memory was too small."""
    engine = engine_for("gpt2")
    verifier: Any = WrappedVerifier(engine.verifier, score=raising(error))
    rows = [row_for(engine, n, LONGEST, verifier=verifier) for n in (5, 9)]
    with pytest.raises(DeviceMemoryError, match="no room for 2"):
        list(Scheduler(verifier).run(rows, drafters(engine)["heads"]))
