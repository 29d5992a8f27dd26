"""Turns of many conversations, found by their messages, for callers that send all messages each
time (turns.py says what becomes of them).

The store is bounded; the turns used longest ago go first. Any thread may use it.
"""

import hashlib
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from medusa_kit.data.readers import Message
from medusa_kit.engine.turns import Answered, without_reasoning

MAX_BYTES = 32 * 1024 * 1024
BYTES_PER_ID = 40  # an int and its slot in a list


class RecentTurns:
    """The turns last used. `max_bytes`: about so much memory is used at most."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._turns: OrderedDict[bytes, tuple[Answered, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._turns)

    def before(self, context: str, messages: Sequence[Message]) -> Answered | None:
        """The latest turn that these messages go on from. `context`: what else the ids depend on;
        turns of another one are not found."""
        answers = [key for message, key in _keys(context, messages) if _is_answer(message)]
        with self._lock:
            for key in reversed(answers):
                if key in self._turns:
                    self._turns.move_to_end(key)
                    return self._turns[key][0]
        return None

    def keep(self, context: str, turn: Answered) -> None:
        *_, (_, key) = _keys(context, [*turn.prompt.messages, turn.message])
        size = _num_bytes(turn)
        if size > self.max_bytes:
            return
        with self._lock:
            self._drop(key)
            while self._num_bytes + size > self.max_bytes:
                self._drop(next(iter(self._turns)))
            self._turns[key] = turn, size
            self._num_bytes += size

    def _drop(self, key: bytes) -> None:
        _, size = self._turns.pop(key, (None, 0))
        self._num_bytes -= size


def _keys(context: str, messages: Sequence[Message]) -> Iterator[tuple[Message, bytes]]:
    """Each message with the digest of all up to it."""
    digest = hashlib.sha256(_bytes(context))
    for message in messages:
        digest.update(_bytes(without_reasoning(message)))
        yield message, digest.digest()


def _bytes(content: Any) -> bytes:
    """The bytes of a message; no message's are the beginning of another's."""
    return json.dumps(content, sort_keys=True).encode() + b"\n"


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant"


def _num_bytes(turn: Answered) -> int:
    texts = [turn.prompt.text, *map(json.dumps, [*turn.prompt.messages, turn.message])]
    num_ids = len(turn.prompt.ids) + len(turn.ids)
    return BYTES_PER_ID * num_ids + sum(map(sys.getsizeof, texts))
