"""What a body may hold, found in its bytes before it is parsed.

Parsing and validation hold the interpreter, and every client with it, for as long as the number of
values in a body makes them. Counting what JSON is built of takes some milliseconds a megabyte, most
of them in numpy, which lets others run.
"""

import asyncio
import contextlib
import ctypes
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
MAX_VALUES = 400_000  # of lists and objects
MAX_PAIRS = 40_000
MAX_INSIDE = 20_000  # lists and objects
MAX_LEVELS = 200
MAX_DIGITS = 1000  # of a number: each takes time by the square of them
LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
STRIDE = MAX_DIGITS // 2
LARGE = 1 << 20  # bytes of a body whose memory is given back afterwards
A_WHILE = 1.0  # seconds
BLOCK = 1 << 17  # bytes that are looked at together
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
    count, inside, escaped = _Count(), False, False
    outside_blocks: list[bytes] = []
    for start in range(0, len(body), BLOCK):  # most that have too many have so early
        read = np.frombuffer(body[start : start + BLOCK], np.uint8)
        outside, inside, escaped = outside_of_text(read, inside, escaped)
        count.add(outside)
        outside_blocks.append(outside.tobytes())
    if LONG_NUMBER.search(b"".join(outside_blocks)):
        raise ShapeError(f"the body has a number of over {MAX_DIGITS} digits")


class _Count:
    """Counts values, pairs and levels in a body's bytes outside of text, block by block."""

    def __init__(self) -> None:
        self._values = self._pairs = self._inside = self._level = 0

    def add(self, outside: NDArray[np.uint8]) -> None:
        """Raises ShapeError."""
        openings = (outside == ord("[")) | (outside == ord("{"))
        closings = (outside == ord("]")) | (outside == ord("}"))
        levels = np.cumsum(openings.astype(np.int8) - closings.astype(np.int8), dtype=np.int32)
        if len(levels) and self._level + int(levels.max()) > MAX_LEVELS:
            raise ShapeError(
                "the body is nested too deeply: objects and lists in one another, more than "
                f"{MAX_LEVELS} of them"
            )
        self._level += int(levels[-1]) if len(levels) else 0
        self._values += _count(outside == ord(","))
        self._pairs += _count(outside == ord(":"))
        self._inside += _count(openings)
        _check_number("values", self._values, MAX_VALUES)
        _check_number("pairs of names and values", self._pairs, MAX_PAIRS)
        _check_number("lists and objects", self._inside, MAX_INSIDE)


def _may_be_large(body: bytes) -> bool:
    """Counts text too, so most bodies need no closer look."""
    opened = body.count(b"[") + body.count(b"{")
    return (
        opened > MAX_LEVELS
        or body.count(b",") > MAX_VALUES
        or body.count(b":") > MAX_PAIRS
        or _may_have_long_numbers(np.frombuffer(body, np.uint8))
    )


def _may_have_long_numbers(read: NDArray[np.uint8]) -> bool:
    """Whether two digits are at a distance that only a long number has, or chance."""
    digits = (read[::STRIDE] - np.uint8(ord("0"))) < 10
    return bool(np.any(digits[1:] & digits[:-1]))


def outside_of_text(
    read: NDArray[np.uint8], inside: bool, escaped: bool
) -> tuple[NDArray[np.uint8], bool, bool]:
    """The bytes that are in no string; then whether the next byte is in one, and behind a
    backslash. `inside`, `escaped`: whether the first is so."""
    quotes = read == QUOTE
    backslashes = np.flatnonzero(read == BACKSLASH)
    if escaped:
        quotes[0], backslashes = False, backslashes[backslashes > 0]
    escaped = False
    if len(backslashes):
        behind = _behind_odd(backslashes)
        escaped = int(behind[-1]) == len(read) if len(behind) else False
        quotes[behind[behind < len(read)]] = False
    if inside:
        quotes = np.concatenate(([True], quotes))
    within = np.bitwise_xor.accumulate(quotes.view(np.uint8)).view(np.bool_)
    last = bool(within[-1]) if len(within) else inside
    return read[~(within[1:] if inside else within)], last, escaped


def _behind_odd(backslashes: NDArray[np.intp]) -> NDArray[np.intp]:
    """The positions behind an odd number of backslashes, which are at `backslashes`."""
    breaks = np.flatnonzero(np.diff(backslashes) != 1)
    first = backslashes[np.concatenate(([0], breaks + 1))]
    behind = backslashes[np.concatenate((breaks, [len(backslashes) - 1]))] + 1
    return behind[(behind - first) % 2 == 1]


def _count(marks: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(marks))


def _check_number(things: str, number: int, maximum: int) -> None:
    if number > maximum:
        raise ShapeError(f"the body has {number:,} {things}; expected at most {maximum:,}")


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
