"""Connections that wait: for a request, or for what has arrived on them to be parsed."""

import asyncio
from collections import OrderedDict, deque
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

RESTED = 1.0  # seconds that a connection must have been idle between requests to make room
PIECE = 2048  # bytes parsed at a time, of what may be chunks of a byte each
EXPENSIVE = 0.001  # seconds for a piece, behind which as long a pause follows


class Flow(FlowControl):
    """`paused`: nothing more is read, whoever asks for it."""

    paused = False

    def resume_reading(self) -> None:
        if not self.paused:
            super().resume_reading()


class Idle:
    """Connections without a request under way, those that have been so longest first."""

    def __init__(self) -> None:
        self._silent: OrderedDict[Any, float] = OrderedDict()  # which have not sent a whole one
        self._between: OrderedDict[Any, float] = OrderedDict()

    def add(self, connection: Any, silent: bool) -> None:
        since = asyncio.get_running_loop().time()
        (self._silent if silent else self._between)[connection] = since

    def remove(self, connection: Any) -> None:
        self._silent.pop(connection, None)
        self._between.pop(connection, None)

    def make_room(self) -> bool:
        """Break one off. Those that have been used may be about to be used again."""
        rested = asyncio.get_running_loop().time() - RESTED
        if self._silent:
            connection, _ = self._silent.popitem(last=False)
        elif self._between and next(iter(self._between.values())) <= rested:
            connection, _ = self._between.popitem(last=False)
        else:
            return False
        connection.transport.abort()
        return True


class Paced:
    """What has arrived and is not parsed yet, in turns of a piece for each connection, with the
    loop's other work in between: h11 takes half a second for 256 KiB of chunks of one byte."""

    def __init__(self) -> None:
        self._unparsed: dict[Any, bytearray] = {}
        self._order: deque[Any] = deque()
        self._running = False

    def add(self, connection: Any, data: bytes) -> None:
        connection.flow.pause_reading()
        connection.flow.paused = True
        if connection not in self._unparsed:
            self._unparsed[connection] = bytearray()
            self._order.append(connection)
        self._unparsed[connection] += data
        if not self._running:
            self._running = True
            self._step()

    def remove(self, connection: Any) -> None:
        if self._unparsed.pop(connection, None) is not None:
            self._order.remove(connection)

    def _step(self) -> None:
        if not self._order:
            self._running = False
            return
        connection = self._order.popleft()
        unparsed = self._unparsed[connection]
        size = len(unparsed) if connection.parses_fast else PIECE
        piece = bytes(unparsed[:size])
        del unparsed[:size]
        if unparsed:
            self._order.append(connection)
        else:
            del self._unparsed[connection]
            connection.flow.paused = False
            connection.flow.resume_reading()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if not connection.transport.is_closing():
                connection.take(piece)
        finally:
            # Else the other threads get the interpreter only by force, 5 ms later each time.
            spent = loop.time() - began
            loop.call_later(spent if spent > EXPENSIVE else 0.0, self._step)
