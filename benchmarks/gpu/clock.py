"""More ways to time than `doctor --gpu` needs: queued calls, single calls, replayed graphs."""

from collections.abc import Callable
from typing import Any

from medusa_kit.bench.gpu import clock
from medusa_kit.bench.gpu.clock import WARM_UPS
from medusa_kit.infer.device.capture import GraphMemory


class Clock(clock.Clock):
    """Times calls on one device."""

    def together(self, call: Callable[[], Any], repeats: int, warm_ups: int = WARM_UPS) -> float:
        """Mean seconds of calls that are queued one after another without a wait."""

        def all_of_them() -> None:
            for _ in range(repeats):
                call()

        for _ in range(warm_ups):
            call()
        self.wait()
        return self.around(all_of_them)() / repeats

    def once(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """(what the call returns, its seconds), without a warm-up."""
        result: list[Any] = []
        self.wait()
        measured = self.around(lambda: result.append(call()))
        return result[0], measured()

    def replayable(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call as a CUDA graph, as inside a captured step; on a CPU the call itself.

        It must not read anything on the host.
        """
        if not self.on_cuda:
            return call
        return GraphMemory(self.device).capture(call).replay
