"""Large bodies take turns."""

import asyncio
import threading

import pytest

from medusa_kit.serve.operations.bodies import SMALL, Turns


def test_large_bodies_take_turns_the_smallest_first() -> None:
    order: list[int] = []
    gate, inside = threading.Event(), threading.Lock()

    def work(size: int) -> int:
        assert gate.wait(30)
        with inside:
            order.append(size)
        return size

    async def main() -> None:
        turns = Turns()
        sizes = [SMALL + 5, SMALL + 9, SMALL + 7, SMALL + 3]
        tasks = [asyncio.create_task(turns.run(size, work, size)) for size in sizes]
        cancelled = asyncio.create_task(turns.run(SMALL + 1, work, 0))
        await asyncio.sleep(0)  # all wait, but the first
        cancelled.cancel()
        assert await turns.run(SMALL, lambda: "at once") == "at once"
        gate.set()
        assert await asyncio.gather(*tasks) == sizes
        assert order == [SMALL + 5, SMALL + 3, SMALL + 7, SMALL + 9]
        with pytest.raises(ZeroDivisionError):
            await turns.run(SMALL + 1, lambda: 1 / 0)
        assert await turns.run(SMALL + 1, work, 1) == 1

    asyncio.run(main())
