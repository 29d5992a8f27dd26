"""What a body may hold, found in its bytes before it is parsed.

Parsing and validation hold the interpreter, and every client with it, for as long as the number of
values in a body makes them. Counting what JSON is built of takes some milliseconds a megabyte, most
of them in numpy, which lets others run.
"""

import asyncio
import heapq
import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

SMALL = 4096  # bytes: a body that is checked and parsed at once
MOST_VALUES = 400_000  # of lists and objects
MOST_PAIRS = 40_000
MOST_INSIDE = 20_000  # lists and objects
MOST_LEVELS = 200
MOST_DIGITS = 1000  # of a number: each takes time by the square of them
LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))
STRIDE = MOST_DIGITS // 2
MARKS_OF_OTHERS = (b"\xff\xfe", b"\xfe\xff")  # how UTF-16 and UTF-32 begin
QUOTE, BACKSLASH = ord('"'), ord("\\")


class ShapeError(ValueError):
    """A body that is not parsed."""


def check_shape(body: bytes) -> None:
    """Raises ShapeError for more values, or levels of them, than a request has use for, and for
    text that is not UTF-8, in which they could not be counted."""
    if body.startswith(MARKS_OF_OTHERS) or b"\0" in body[:4]:
        raise ShapeError("the body is no JSON: it is not UTF-8")
    if not _may_be_large(body):
        return
    outside = _outside_of_text(body)
    openings = (outside == ord("[")) | (outside == ord("{"))
    closings = (outside == ord("]")) | (outside == ord("}"))
    levels = np.cumsum(openings.astype(np.int8) - closings.astype(np.int8), dtype=np.int32)
    if len(levels) and int(levels.max()) > MOST_LEVELS:
        raise ShapeError(
            "the body is nested too deeply: objects and lists in one another, more than "
            f"{MOST_LEVELS} of them"
        )
    _check_number("values", _count(outside == ord(",")), MOST_VALUES)
    _check_number("pairs of names and values", _count(outside == ord(":")), MOST_PAIRS)
    _check_number("lists and objects", _count(openings), MOST_INSIDE)
    if _may_have_long_numbers(outside) and LONG_NUMBER.search(outside.tobytes()):
        raise ShapeError(f"the body has a number of over {MOST_DIGITS} digits")


def _may_be_large(body: bytes) -> bool:
    """Counts text too, so most bodies need no closer look."""
    opened = body.count(b"[") + body.count(b"{")
    return (
        opened > MOST_LEVELS
        or body.count(b",") > MOST_VALUES
        or body.count(b":") > MOST_PAIRS
        or _may_have_long_numbers(np.frombuffer(body, np.uint8))
    )


def _may_have_long_numbers(read: NDArray[np.uint8]) -> bool:
    """Two digits at a distance that only a long number has, or chance."""
    digits = (read[::STRIDE] - np.uint8(ord("0"))) < 10
    return bool(np.any(digits[1:] & digits[:-1]))


def _outside_of_text(body: bytes) -> NDArray[np.uint8]:
    """The bytes that are in no string."""
    read = np.frombuffer(body, np.uint8)
    quotes = read == QUOTE
    if b"\\" in body:
        quotes[_escaped(read)] = False
    inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)).view(np.bool_)
    return read[~inside]


def _escaped(read: NDArray[np.uint8]) -> NDArray[np.intp]:
    """The places of bytes behind an odd number of backslashes."""
    places = np.flatnonzero(read == BACKSLASH)
    breaks = np.flatnonzero(np.diff(places) != 1)
    first = places[np.concatenate(([0], breaks + 1))]
    behind = places[np.concatenate((breaks, [len(places) - 1]))] + 1
    odd = behind[(behind - first) % 2 == 1]
    return odd[odd < len(read)]


def _count(found: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(found))


def _check_number(what: str, number: int, most: int) -> None:
    if number > most:
        raise ShapeError(f"the body has {number:,} {what}; expected at most {most:,}")


class Turns:
    """Work on large bodies is done in one thread, one at a time, that on the smallest first. So it
    takes no more of the interpreter's time, however many come together."""

    def __init__(self) -> None:
        self._taken = False
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

    def _give(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[-1]
            if not turn.done():
                return turn.set_result(None)
        self._taken = False


@cache
def _thread() -> ThreadPoolExecutor:
    """Of its own: the loop's other threads may all be busy with prompts."""
    return ThreadPoolExecutor(1, "medusa-kit bodies")
