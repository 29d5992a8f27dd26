"""The cache of a model that carries states: slots for its attention, and a state for each row.

A state cannot be cut back. So a row keeps the one after its last forward of which everything was
kept; tokens accepted since then are unread, and its next forward reads them again in front of its
new draft tokens. Slots behind the kept state are written again then.

A later text can begin with a row's only where a state was kept: where the row's own reading began,
where earlier texts parted from it (`mark`), behind its prompt, and behind its answer.
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
MAX_KEPT = 3  # states of a row besides the newest; more take memory


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
        self, config: Any, batch_size: int, num_positions: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(layers_for(config, self), batch_size, num_positions, dtype)
        self._stateful = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        self.unread: list[list[int]] = [[] for _ in range(batch_size)]
        self._states: list[RowState | None] = [None] * batch_size
        # Further states of a row by the tokens that they have read, fewest first.
        self._kept: list[dict[int, RowState]] = [{} for _ in range(batch_size)]
        self._pieces: dict[int, int] = {}  # of prompts that are being read: where a piece has ended
        self._marks: dict[int, int] = {}
        self._readings: dict[int, Reading] = {}

    @contextmanager
    def reading(self, rows: Sequence[int], tokens: Sequence[list[int]]) -> Iterator[None]:
        """Let one forward read these tokens, the rows' unread ones first. Rows that go on from a
        state, and rows that begin, cannot share one."""
        states = [self._states[row] for row in rows]
        for index, layer in enumerate(self._stateful):
            layer.begin(None if states[0] is None else [state[index] for state in states if state])
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

    def mark(self, row: int, length: int) -> None:
        self._marks[row] = length

    def before_mark(self, row: int, count: int) -> int:
        """How many of a row's next tokens, `count` in all, are to be read first, so that a state
        can be kept behind them; 0: they need not be divided."""
        first = self._marks.get(row, 0) - self.lengths[row]
        return first if 0 < first < count else 0

    def keep_state(self, rows: Sequence[int]) -> None:
        """Keep states, so that a later text can go on after what these rows have read so far."""
        for row in rows:
            self._keep(row, self._known(row))

    def end_prompt(self, rows: Sequence[int]) -> None:
        """Note that what these rows have read so far is their prompt, or a part of it."""
        for row in rows:
            if (piece := self._pieces.get(row, 0)) != self._marks.get(row):
                self._kept[row].pop(piece, None)
            self._pieces[row] = self.lengths[row]
        self.keep_state(rows)

    def _keep(self, row: int, known: dict[int, RowState]) -> None:
        """Keep the first of these states, which most texts share, and the last ones."""
        lengths = sorted(known)
        if len(lengths) > MAX_KEPT:
            lengths = [lengths[0], *lengths[1 - MAX_KEPT :]]
        self._kept[row] = {length: known[length] for length in lengths}

    def num_unread(self, rows: Sequence[int]) -> int:
        return sum(len(self.unread[row]) for row in rows)

    def usable(self, row: int, length: int) -> int:
        """The most of a row's first `length` tokens that a state was kept after."""
        return max((known for known in self._known(row) if known <= length), default=0)

    def _known(self, row: int) -> dict[int, RowState]:
        """States of a row by the tokens that they have read."""
        state = self._states[row]
        return {**self._kept[row], **({} if state is None else {self.lengths[row]: state})}

    @no_gradients
    def keep_first(self, row: int, length: int) -> None:
        """As in TreeCache; `length` is 0 or one that is `usable`. Raises KeyError for another."""
        self._begin(row, self._known(row), length)
        super().keep_first(row, length)

    @no_gradients
    def take_row(self, target: int, other: TreeCache, source: int, length: int) -> None:
        assert isinstance(other, ChainCache)
        self._begin(target, other._known(source), length)
        self.lengths[target] = length
        super().take_row(target, other, source, length)

    def _begin(self, row: int, known: dict[int, RowState], length: int) -> None:
        """Let a row go on after so many tokens."""
        self._states[row] = known[length] if length else None
        self._keep(row, {size: state for size, state in known.items() if size <= length})
        self.unread[row] = []
        for by_row in (self._readings, self._pieces, self._marks):
            by_row.pop(row, None)

    def forget(self, row: int) -> None:
        super().forget(row)
        self._begin(row, {}, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that slots and states take."""
        states = {id(state): state for state in self._states if state is not None}
        states |= {id(state): state for kept in self._kept for state in kept.values()}
        return super().num_bytes + sum(_bytes(state) for state in states.values())

    def grow(self, num_positions: int, num_rows: int | None = None) -> None:
        super().grow(num_positions, num_rows)
        rows = len(self.lengths)
        new_rows = rows - len(self.unread)  # below 0: there are fewer
        self.unread = [*self.unread[:rows], *([] for _ in range(new_rows))]
        self._states = [*self._states[:rows], *[None] * new_rows]
        self._kept = [*self._kept[:rows], *({} for _ in range(new_rows))]
        for by_row in (self._readings, self._pieces, self._marks):
            by_row.clear()


def _bytes(state: RowState) -> int:
    tensors: list[Tensor] = [tensor for layer in state for tensor in layer if tensor is not None]
    return sum(tensor.nbytes for tensor in tensors)
