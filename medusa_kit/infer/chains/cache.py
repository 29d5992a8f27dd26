"""The cache of a model that carries states: slots for its attention, and a state for each row.

A state cannot be cut back. So a row keeps the one after its last forward of which everything was
kept; tokens accepted since then are unread, and its next forward reads them again in front of its
new draft tokens. Slots behind the kept state are written again then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_kit.infer.chains.layers import LayerState, StateLayer, layers_for
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.no_gradients import no_gradients

RowState = tuple[LayerState, ...]  # of one row, in all layers with states


@dataclass(frozen=True)
class Reading:
    """A row's last forward: the tokens that it read, the first of them committed before, and the
    row's states after all of them."""

    tokens: list[int]
    num_unread: int
    state: RowState


class ChainCache(TreeCache):
    """`lengths[b]`: tokens of row b that its kept state has read. `unread[b]`: those committed
    since."""

    def __init__(
        self, config: Any, batch_size: int, num_slots: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(layers_for(config, self), batch_size, num_slots, dtype)
        self._stateful = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        self.unread: list[list[int]] = [[] for _ in range(batch_size)]
        self._states: list[RowState | None] = [None] * batch_size
        # After a row's prompt: (its length, the state), which a later prompt may begin with.
        self._prompts: list[tuple[int, RowState] | None] = [None] * batch_size
        self._readings: dict[int, Reading] = {}

    @contextmanager
    def reading(self, rows: Sequence[int], tokens: Sequence[list[int]]) -> Iterator[None]:
        """Let one forward read these tokens, the rows' unread ones first. Rows that go on from a
        state, and rows that begin, cannot share one."""
        states = [self._states[row] for row in rows]
        for at, layer in enumerate(self._stateful):
            layer.begin(None if states[0] is None else [one[at] for one in states if one])
        with self.using(rows):
            yield
        new = zip(*(layer.end(len(rows)) for layer in self._stateful), strict=True)
        for row, text, state in zip(rows, tokens, new, strict=True):
            self._readings[row] = Reading(list(text), len(self.unread[row]), state)

    @no_gradients
    def commit(self, kept: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> None:
        """Keep the first tokens of each row's last forward, as many as there are in `kept`."""
        for row, nodes in zip(
            range(len(self.lengths)) if rows is None else rows, kept, strict=True
        ):
            reading = self._readings.pop(row)
            committed = reading.tokens[: reading.num_unread + len(nodes)]
            if len(committed) == len(reading.tokens):
                self._states[row], self.unread[row] = reading.state, []
                self.lengths[row] += len(committed)
            else:
                self.unread[row] = committed

    def end_prompt(self, rows: Sequence[int]) -> None:
        """What these rows have read so far is their prompt, or a part of it."""
        for row in rows:
            if (state := self._states[row]) is not None:
                self._prompts[row] = self.lengths[row], state

    def num_unread(self, rows: Sequence[int]) -> int:
        return sum(len(self.unread[row]) for row in rows)

    def usable(self, row: int, length: int) -> int:
        """The most of a row's first `length` tokens that a state was kept after."""
        return max((known for known in self._known(row) if known <= length), default=0)

    def _known(self, row: int) -> dict[int, RowState]:
        """States of a row by the tokens that they have read."""
        prompt, state = self._prompts[row], self._states[row]
        return {
            **({} if prompt is None else {prompt[0]: prompt[1]}),
            **({} if state is None else {self.lengths[row]: state}),
        }

    @no_gradients
    def keep_first(self, row: int, length: int) -> None:
        """The same; `length` is none or one that is `usable`. Raises KeyError for another."""
        self._take_state(row, self._known(row), length)
        super().keep_first(row, length)

    @no_gradients
    def take_row(self, target: int, other: TreeCache, source: int, length: int) -> None:
        assert isinstance(other, ChainCache)
        state = other._known(source)[length] if length else None
        self._states[target], self._prompts[target], self.lengths[target] = state, None, length
        super().take_row(target, other, source, length)

    def _take_state(self, row: int, known: dict[int, RowState], length: int) -> None:
        self._states[row] = known[length] if length else None
        prompt = self._prompts[row]
        if prompt is not None and prompt[0] > length:
            self._prompts[row] = None
        self.unread[row] = []
        self._readings.pop(row, None)

    def forget(self, row: int) -> None:
        super().forget(row)
        self._take_state(row, {}, 0)

    @property
    def num_bytes(self) -> int:
        """Of memory that slots and states take."""
        states = {id(one): one for one in self._states if one is not None}
        states |= {id(one[1]): one[1] for one in self._prompts if one is not None}
        return super().num_bytes + sum(_bytes(state) for state in states.values())

    def _replace(self, rows: Sequence[int | None], num_slots: int) -> None:
        super()._replace(rows, num_slots)
        self.unread = [[] if row is None else self.unread[row] for row in rows]
        self._states = [None if row is None else self._states[row] for row in rows]
        self._prompts = [None if row is None else self._prompts[row] for row in rows]
        self._readings = {}


def _bytes(state: RowState) -> int:
    tensors: list[Tensor] = [one for layer in state for one in layer if one is not None]
    return sum(tensor.nbytes for tensor in tensors)
