"""What requests ask of their answers, looked at in children (lanes.py), and remembered."""

import asyncio
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from medusa_kit.background import in_background
from medusa_kit.errors import ClosedError, ConfigError, MedusaKitError, QueueFullError
from medusa_kit.serve.bounded.child import Answer, constraint_from, look_at
from medusa_kit.serve.bounded.lanes import MAX_QUICK, MAX_SLOW, NICE, QUICK, SLOW, Lane
from medusa_kit.serve.calls.call_form import HERMES, CallForm
from medusa_kit.serve.calls.tools import Constraint, constraint_of
from medusa_kit.serve.errors import ServerClosingError
from medusa_kit.serve.hints import SIMPLER

KEPT, MAX_KEPT = 1024, 32 << 20  # answers, and bytes of what was asked for
LOOK = 0.1  # seconds until those who wait see that the server closes


class Constraints:
    """Used in asyncio's loop. Children are started with the first that has to be looked at, or by
    `start`. `closing`: whether the server takes no more requests."""

    def __init__(self, closing: Callable[[], bool] = lambda: False) -> None:
        self._closing = closing
        self._lanes: tuple[Lane, Lane] | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._known: OrderedDict[bytes, tuple[Answer, int]] = OrderedDict()
        self._num_bytes = 0
        self._under_way: dict[bytes, asyncio.Task[Answer]] = {}

    async def of(
        self,
        response_format: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
        parallel_tool_calls: bool | None,
        form: CallForm = HERMES,
    ) -> Constraint:
        """The constraint of a request, as by `constraint_of`, after its grammar has been tried.
        Raises what that raises, ConfigError for what takes too long or too much memory,
        QueueFullError where too many wait."""
        fields = (response_format, tools, tool_choice, parallel_tool_calls, form)
        if not tools and (response_format or {}).get("type") != "json_schema":
            return constraint_of(*fields)
        serialized = json.dumps(fields).encode()
        key = hashlib.sha256(serialized).digest()
        answer = self._remembered(key)
        if answer is None:
            # Of several that ask for the same one waits in line, and goes on for the others.
            task = self._under_way.get(key)
            if task is None:
                task = asyncio.ensure_future(self._looked_at(key, len(serialized), fields))
                self._under_way[key] = task
                task.add_done_callback(partial(self._ended, key))
            answer = await self._waited_for(task)
        return _constraint_or_error(answer, tools)

    async def _waited_for(self, task: "asyncio.Task[Answer]") -> Answer:
        """Raises ServerClosingError as soon as the server closes."""
        while not task.done():
            if self._closing():
                raise ServerClosingError("the server is closing", code="closing")
            await asyncio.wait({task}, timeout=LOOK)
        return task.result()

    def start(self) -> None:
        """Start the children, which takes a moment of theirs."""
        with self._starting:
            if self._lanes is None and not self._closed and hasattr(os, "fork"):
                self._lanes = Lane(QUICK, MAX_QUICK), Lane(SLOW, MAX_SLOW, NICE)

    def close(self) -> None:
        """End the children; those who wait get ClosedError."""
        with self._starting:
            self._closed = True
            for lane in self._lanes or ():
                lane.close()

    async def _looked_at(self, key: bytes, size: int, fields: tuple[Any, ...]) -> Answer:
        if not hasattr(os, "fork"):  # on Windows there is no budget
            return await asyncio.wrap_future(in_background(look_at, fields))
        self.start()
        if self._lanes is None:
            raise ClosedError("the server takes no more requests")
        quick, slow = self._lanes
        answer = await asyncio.wrap_future(quick.ask(fields))
        if answer.kind in ("time", "wall"):
            answer = await asyncio.wrap_future(slow.ask(fields))
        if answer.kind == "wall":  # which may be the machine's fault
            raise QueueFullError("compiling the schema timed out", hint="ask again later")
        if answer.kind == "failed":
            raise MedusaKitError(f"the schema could not be compiled: {answer.value}")
        self._remember(key, answer, size)
        return answer

    def _ended(self, key: bytes, task: "asyncio.Task[Answer]") -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # nobody may wait any more

    def _remembered(self, key: bytes) -> Answer | None:
        if key not in self._known:
            return None
        self._known.move_to_end(key)
        return self._known[key][0]

    def _remember(self, key: bytes, answer: Answer, size: int) -> None:
        self._known[key] = answer, size
        self._num_bytes += size
        while len(self._known) > KEPT or self._num_bytes > MAX_KEPT:
            _, (_, size) = self._known.popitem(last=False)
            self._num_bytes -= size


def _constraint_or_error(answer: Answer, tools: Any) -> Constraint:
    """The constraint that a child found. Raises ConfigError, RecursionError where it found none."""
    if answer.kind == "found":
        return constraint_from(answer.value, tools)
    if answer.kind == "refused":
        raise ConfigError(answer.value, hint=answer.hint)
    if answer.kind == "nested":
        raise RecursionError
    limit = f"{SLOW.seconds:g} s" if answer.kind == "time" else f"{SLOW.num_bytes >> 20} MB"
    field, whose = ("tools", "their schemas") if tools else ("response_format", "its schema")
    message = f"{field}: {whose} would take more than {limit} to make a grammar of"
    raise ConfigError(message, hint=SIMPLER)
