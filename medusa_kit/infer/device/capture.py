"""Recording a step in a CUDA graph, so that a failure costs the graph and nothing else.

`torch.cuda.graph` ends a capture, then restores the stream. Ending it fails once something that is
forbidden has run. Then the capture's stream stays current, torch below 2.12 goes on taking memory
from the graph's pool, and the random generator still counts as being recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from medusa_kit.garbage import no_search
from medusa_kit.locks import SharedLock

Work = Callable[[], object]
# Only one thread captures at a time: the first one to end would turn the collector on for others.
_capturing = SharedLock()
# Torch's allocator of pinned memory goes on asking a graph whose capture failed whether it records.
_failed: list[torch.cuda.CUDAGraph] = []


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


class GraphMemory:
    """What all graphs of a model share: a memory pool, since only one of them runs at a time, and
    the stream they are recorded on, since torch reuses memory only within one stream.

    Torch gives up a pool with the last graph in it and refuses to capture into it again. So a graph
    of no use stays in the pool, and after a failed capture, which may have taken the pool with it,
    the next graphs get a new one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()
            self.pool: Any = torch.cuda.graph_pool_handle()
        self._stays: torch.cuda.CUDAGraph | None = None
        self._last: torch.cuda.Stream | None = None  # that a graph was replayed on

    def take_turn(self) -> None:
        """Let the current stream wait for the one on which graphs ran before: threads may have
        streams of their own."""
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """Run `work` twice, then record it once.

        The first run may compile and allocate. Raises what `work` raised, or RuntimeError; the
        current stream, the allocator and the generator of random numbers are then what they were
        before.
        """
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                work()
                work()
            current.wait_stream(self.stream)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the warm-up's memory lies outside the pool
            with torch.cuda.stream(self.stream):
                if self._stays is None:
                    self._stays = self._record(self._fill)
                return self._record(work)

    def _fill(self) -> None:
        torch.zeros(
            1, dtype=torch.float32, device=self.device
        )  # torch warns of graphs that hold nothing

    def _renew(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._stays = None

    def _record(self, work: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with no_collection(), self._as_before(graph):
            # thread_local: another thread may allocate or wait meanwhile.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # what `work` raised says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    @contextmanager
    def _as_before(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Undo what a failed capture leaves behind in torch."""
        generator = torch.cuda.default_generators[self.stream.device_index]
        state = generator.clone_state()
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # raised where the allocator has let go already
                torch._C._cuda_endAllocateToPool(self.stream.device_index, self.pool)
            generator.graphsafe_set_state(state)
            self._renew()
            _failed.append(graph)
            raise


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector leaves what is inside alone: a graph or an event that it frees
    would end the capture under way."""
    with _capturing, no_search():
        yield
