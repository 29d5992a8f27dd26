"""A capture that fails leaves torch as it was, and the loop answers.

torch.cuda is a stand-in here that keeps what a capture changes: the current stream, whose
allocations the graph's pool gets, whether the generator is being recorded.
"""

import gc
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.small_engines import (
    BUSHY,
    build_engine,
    engine_with_heads,
    random_heads,
    random_prompt,
)
from support.tiny_models import tiny_base

from medusa_kit.infer.device.capture import GraphMemory, no_collection
from medusa_kit.infer.device.captured import CapturedForward
from medusa_kit.infer.device.verifier import CapturedVerifier

CUDA = torch.device("cuda", 0)
INVALID = "operation failed due to a previous error during capture"


@dataclass
class Device:
    """What torch.cuda keeps. `torch_ends`: this torch lets go of a failed capture's pool."""

    torch_ends: bool
    stream: Any = "main"
    pools: list[Any] = field(default_factory=list)
    recording: bool = False
    begins: bool = True
    valid: bool = True

    @property
    def as_before(self) -> bool:
        return (self.stream, self.pools, self.recording) == ("main", [], False)

    # As the generator of random numbers: its state says that it is being recorded.

    def clone_state(self) -> bool:
        return False

    def graphsafe_set_state(self, recording: bool) -> None:
        self.recording = recording

    def end_allocate(self, index: int, pool: Any) -> None:
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)


class Streamed:
    """As torch's: left without `__exit__`, it stays the current one."""

    device: Device

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before, self.device.stream = self.device.stream, self.stream

    def __exit__(self, *_: object) -> None:
        self.device.stream = self.before


class Stream:
    device_index = 0

    def wait_stream(self, other: Any) -> None: ...


class Graph:
    """As at::cuda::CUDAGraph: what fails in capture_end leaves the rest of it undone."""

    device: Device

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.device.pools.append(pool)
        self.device.recording = True
        if not self.device.begins:
            raise RuntimeError("cannot begin")

    def capture_end(self) -> None:
        if self.device.valid or self.device.torch_ends:
            self.device.pools.pop()
        if not self.device.valid:
            raise RuntimeError(INVALID)
        self.device.recording = False


@pytest.fixture(params=[True, False], ids=["torch 2.13", "torch 2.11"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    one = Device(request.param)
    stand_ins: dict[str, Any] = {
        "Stream": Stream, "current_stream": lambda _=None: Stream(),
        "graph_pool_handle": lambda: (0, 1),
        "stream": type("stream", (Streamed,), {"device": one}),
        "CUDAGraph": type("CUDAGraph", (Graph,), {"device": one}),
        "device": lambda _: nullcontext(), "default_generators": (one,),
        "synchronize": lambda: None, "empty_cache": lambda: None,
    }  # fmt: skip
    monkeypatch.setattr(GraphMemory, "_fill", lambda self: None)
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", one.end_allocate, raising=False)
    return one


def test_only_the_third_run_is_recorded_and_nothing_is_collected_meanwhile(device: Device) -> None:
    seen: list[Any] = []
    GraphMemory(CUDA).capture(lambda: seen.append((gc.isenabled(), device.pools[:])))
    assert seen == [(True, []), (True, []), (False, [(0, 1)])]
    assert device.as_before, device
    assert gc.isenabled()


def test_the_collector_stays_off_until_the_last_capture_has_ended() -> None:
    """Two threads capture, of which the one that began first ends first."""
    first, second = threading.Event(), threading.Event()
    seen: list[bool] = []

    def captures() -> None:
        with no_collection():
            first.wait(10)
            seen.append(gc.isenabled())

    def beside() -> None:
        second.set()
        with no_collection():
            ended.join(10)
            seen.append(gc.isenabled())

    ended, other = threading.Thread(target=captures), threading.Thread(target=beside)
    ended.start()
    other.start()
    assert second.wait(10)
    first.set()
    other.join(20)
    assert seen == [False, False]
    assert gc.isenabled()


# In which run of a forward the fault is.
CALLS = {"first run": 1, "second run": 2, "inside": 3, "inside, invalid": 3}


@pytest.mark.parametrize("where", [*CALLS, "begin", "end"])
def test_a_capture_that_fails_leaves_torch_as_it_was(
    device: Device, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the forward runs uncaptured."""
    base = tiny_base("llama")
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always")
    verifier, prompt, calls = engine.verifier, random_prompt(9, 9), []
    assert isinstance(verifier, CapturedVerifier)
    verifier._memory = GraphMemory(CUDA)
    plain = CapturedForward.run

    def run(self: CapturedForward) -> None:
        plain(self)
        calls.append(where)
        if len(calls) == CALLS.get(where):
            device.valid = where != "inside, invalid"
            raise RuntimeError(f"a fault in the {where}\nmore")

    monkeypatch.setattr(CapturedForward, "run", run)
    device.valid, device.begins = where != "end", where != "begin"
    expected = engine_with_heads(tiny_base("llama")).generate(prompt, max_new_tokens=12)
    for _ in range(2):
        result = engine.generate(prompt, max_new_tokens=12)
        assert device.as_before, device
        assert result.token_ids == expected.token_ids
    reason = {"begin": "cannot begin", "end": INVALID}.get(where, f"a fault in the {where}")
    assert verifier.refused == reason
    assert engine.steps_run_by == f"torch (not captured: {reason})"


def test_memory_that_runs_out_inside_a_capture_leaves_torch_as_it_was(device: Device) -> None:
    def work() -> None:
        if device.pools:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        GraphMemory(CUDA).capture(work)
    assert device.as_before, device
