"""Large bodies take turns: parsing holds the interpreter, and every client with it."""

import asyncio
import contextlib
import ctypes
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

SMALL = 4096  # bytes: a body that is parsed at once
LARGE = 1 << 20  # bytes of a body whose memory is given back afterwards
A_WHILE = 1.0  # seconds


class Turns:
    """Work on large bodies is done in one thread, one at a time, that on the smallest first. So it
    takes no more of the interpreter's time, however many come together."""

    def __init__(self) -> None:
        self._taken = self._giving_back = False
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def run(self, size: int, work: Callable[..., T], *given: Any) -> T:
        """What `work` returns; `size`: of the body that it is for, in bytes."""
        if size <= SMALL:
            return work(*given)
        await self._take(size)
        try:
            return await asyncio.get_running_loop().run_in_executor(_thread(), work, *given)
        finally:
            self._give()

    async def _take(self, size: int) -> None:
        if not self._taken:
            self._taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give()
            raise

    def give_back(self) -> None:
        """Memory of large bodies that have been answered, to the system, in a while."""
        if not self._giving_back:
            self._giving_back = True
            asyncio.get_running_loop().call_later(A_WHILE, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = False
        asyncio.get_running_loop().run_in_executor(_thread(), _trim)

    def _give(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[-1]
            if not turn.done():
                return turn.set_result(None)
        self._taken = False


def _trim() -> None:
    """glibc keeps what was freed."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@cache
def _thread() -> ThreadPoolExecutor:
    """The thread for bodies: the loop's other threads may all be busy with prompts."""
    return ThreadPoolExecutor(1, "medusa-kit bodies")
