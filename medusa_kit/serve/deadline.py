"""How long a request may take, whatever it waits for, and threads that it may leave behind."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from medusa_kit.background import in_background
from medusa_kit.serve.errors import RequestTimeoutError

T = TypeVar("T")


class Deadline:
    """A deadline `seconds` from now on; used in asyncio's loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.loop = seconds, asyncio.get_running_loop()
        self.began = self.loop.time()

    async def wait(self, work: Awaitable[T]) -> T:
        """Wait for something. Raises RequestTimeoutError at the deadline."""
        remaining = self.began + self.seconds - self.loop.time()
        try:
            return await asyncio.wait_for(work, max(0.0, remaining))
        except TimeoutError:
            raise RequestTimeoutError(
                f"the request took longer than {self.seconds:g} seconds",
                hint="ask for fewer tokens", code="timeout",
            ) from None  # fmt: skip


class Threads:
    """At most `max_threads` threads at a time. One that is stuck counts, but holds up neither the
    loop nor the exit."""

    def __init__(self, max_threads: int) -> None:
        self._free = asyncio.Semaphore(max_threads)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` in a thread, once one is free. Whoever waits may be cancelled."""
        await self._free.acquire()
        leave = partial(_soon, asyncio.get_running_loop(), self._free.release)
        try:
            future = in_background(work, *args)
        except BaseException:  # no more threads
            self._free.release()
            raise
        future.add_done_callback(leave)
        return await asyncio.wrap_future(future)


def _soon(loop: asyncio.AbstractEventLoop, release: Callable[[], None], _: "Future[Any]") -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(release)
