"""Captures of the stand-in: tapes that run again on the same memory, and fail where CUDA's fail."""

import gc
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from support.cuda_stand_in import Device

pytestmark = pytest.mark.usefixtures("cuda_stand_in")


def on(*values: Any) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


def captured(work: Callable[[], Any], pool: Any = None, mode: str = "thread_local") -> Any:
    """(graph, what `work` returned while it was captured)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool, capture_error_mode=mode)
        try:
            out = work()
        finally:
            graph.capture_end()
    return graph, out


def test_a_replay_computes_anew_from_the_same_memory(cuda_stand_in: Device) -> None:
    given, kept = on(1.0, 2.0), on(0.0, 0.0)
    with cuda_stand_in.counted() as counts:
        graph, out = captured(lambda: kept.copy_(given * 2 + 1))
        assert out is kept
        assert kept.tolist() == [0, 0]  # a capture runs nothing
        for values in ([3.0, 4.0], [5.0, 6.0]):
            given.copy_(torch.tensor(values))
            graph.replay()
            assert kept.tolist() == [2 * value + 1 for value in values]
    assert counts.captures == 1
    assert counts.operations_per_replay == [3, 3]
    assert not [name for name in counts.launches if "mul" in name or "add" in name]


def test_what_a_step_changes_adds_up() -> None:
    total, mask = on(0), on(True)
    graph, _ = captured(lambda: total.add_(torch.where(mask, 2, 0)))
    for _ in range(3):
        graph.replay()
    assert total.tolist() == [6]


def test_torchs_own_context_captures() -> None:
    given, graph = on(1.0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = given + 1
    graph.replay()
    assert out.tolist() == [2]


def test_memory_of_a_capture_holds_until_the_next_replay_of_its_pool() -> None:
    pool, given = torch.cuda.graph_pool_handle(), on(1.0)
    first, out = captured(lambda: given + 1, pool)
    second, _ = captured(lambda: given + 2, pool)
    other, _ = captured(lambda: given + 3)
    assert out.isnan().all()  # never computed
    first.replay()
    other.replay()
    assert out.tolist() == [2]
    second.replay()
    assert out.isnan().all()


def test_what_the_tape_does_not_write_is_never_there() -> None:
    kept = on(0.0, 0.0)

    def work() -> None:
        memory = torch.empty(2, device="cuda")
        memory[:1] = 1
        kept.copy_(memory)

    graph, _ = captured(work)
    graph.replay()
    assert kept.isnan().tolist() == [False, True]


def test_whole_numbers_that_are_stale_show() -> None:
    graph, out = captured(lambda: torch.arange(3, device="cuda"))
    assert int(out.min()) > 10**9
    graph.replay()
    assert out.tolist() == [0, 1, 2]


def test_a_copy_to_pinned_memory_is_part_of_the_tape() -> None:
    given, target = on(1.0), torch.zeros(1).pin_memory()
    graph, _ = captured(lambda: target.copy_(given + 1, non_blocking=True))
    assert target.tolist() == [0]
    graph.replay()
    torch.cuda.synchronize()
    assert target.tolist() == [2]


def test_a_copy_from_pinned_memory_reads_it_at_each_replay() -> None:
    source, kept = torch.ones(1).pin_memory(), on(0.0)
    graph, _ = captured(lambda: kept.copy_(source, non_blocking=True))
    source.fill_(7)
    graph.replay()
    assert kept.tolist() == [7]


def test_pinned_memory_must_outlive_the_graph() -> None:
    first, second = on(0.0), on(0.0)
    held = torch.ones(2).pin_memory()

    def work() -> None:
        first.copy_(held[:1], non_blocking=True)
        second.copy_(torch.ones(1).pin_memory(), non_blocking=True)

    graph, _ = captured(work)
    graph.replay()
    assert first.tolist() == [1]
    assert second.isnan().all()


@pytest.mark.parametrize("wait", [
    lambda x: x.item(),
    lambda x: x.tolist(),
    lambda x: x[x > 0],
    lambda x: torch.tensor([1], device="cuda"),
    lambda x: torch.cuda.synchronize(),
    lambda x: torch.cuda.Event().synchronize(),
])  # fmt: skip
@pytest.mark.parametrize("heard", [True, False])
def test_a_wait_spoils_a_capture(
    wait: Callable[[Any], Any], heard: bool, cuda_stand_in: Device
) -> None:
    x = on(1)

    def work() -> None:
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing") as error:
            wait(x)
        if heard:
            raise error.value

    with pytest.raises(RuntimeError, match="due to a previous error during capture"):
        captured(work)
    assert not torch.cuda.is_current_stream_capturing()
    assert cuda_stand_in.counts.failed_captures == 1
    assert x.tolist() == [1]
    graph, out = captured(lambda: x + 1)  # and the next one is none the worse
    graph.replay()
    assert out.tolist() == [2]


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_waits_of_another_thread_spoil_a_global_capture_only(mode: str) -> None:
    x, failed = on(1), []

    def read() -> None:
        try:
            x.tolist()
        except RuntimeError as error:
            failed.append(error)

    def work() -> torch.Tensor:
        thread = Thread(target=read)
        thread.start()
        thread.join()
        return x + 1

    if mode == "thread_local":
        captured(work, mode=mode)
        assert not failed
    else:
        with pytest.raises(RuntimeError, match="previous error during capture"):
            captured(work, mode=mode)
        assert failed


def test_a_graph_that_goes_during_a_capture_spoils_it() -> None:
    x = on(1)
    old, _ = captured(lambda: x + 1)
    holder = [old]
    del old

    def work() -> None:
        holder.clear()
        gc.collect()

    with pytest.raises(RuntimeError, match="another graph was destroyed"):
        captured(work)


def test_a_capture_needs_a_stream_of_its_own_and_a_replay_a_capture() -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        torch.cuda.CUDAGraph().replay()


def test_work_of_other_threads_is_not_recorded() -> None:
    x, done = on(1), []

    def work() -> torch.Tensor:
        thread = Thread(target=lambda: done.append((x + 5).tolist()))
        thread.start()
        thread.join()
        return x + 1

    graph, _ = captured(work)
    assert done == [[6]]
    assert graph.pool() is not None


def test_a_lost_device_captures_and_replays_nothing(cuda_stand_in: Device) -> None:
    x = on(1)
    graph, _ = captured(lambda: x + 1)
    cuda_stand_in.fail_for_good()
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        graph.replay()
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        captured(lambda: None)


def test_streams_must_wait_for_graphs_of_the_same_pool() -> None:
    pool, given = torch.cuda.graph_pool_handle(), on(1.0)
    (first, _), (second, _) = (captured(lambda: given * 2, pool) for _ in range(2))
    first.replay()
    with torch.cuda.stream(torch.cuda.Stream()):
        with pytest.raises(RuntimeError, match="does not wait"):
            second.replay()
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        second.replay()
