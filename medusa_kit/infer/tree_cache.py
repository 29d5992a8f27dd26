"""The tree cache: keys and values in slots, a length for each row, and commit.

Slots are reserved for the longest row, but on a CPU they take memory page by page as they are
written (`lazy_zeros`), and nothing here touches those that never were.

A forward writes its N nodes after each row's committed tokens. `commit` moves the accepted nodes to
the front and discards the rest. Nothing else is moved, and no layer drops old slots: sliding layers
mask by position instead.

Shapes: B batch, G key/value heads, S slots, E head dim, N nodes with root.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_kit.errors import ContextLengthError
from medusa_kit.infer.lazy_zeros import lazy_zeros, resident_bytes
from medusa_kit.no_gradients import no_gradients
from medusa_kit.transfer import to_device


class TreeCacheLayer(CacheLayerMixin):
    """One layer's slots. The rows' lengths are the cache's, shared by all layers."""

    def __init__(self, index: int, cache: "TreeCache") -> None:
        super().__init__()
        self.index = index
        # Weak, so that a cache nobody uses gives its memory back at once, not when Python next
        # searches for garbage.
        self._cache = weakref.ref(cache)
        self._indexer: TreeCacheLayer | None = None

    @property
    def cache(self) -> "TreeCache":
        return cast(TreeCache, self._cache())  # no assertion: torch.compile cannot trace it

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self.cache.allocate(self.index, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write N nodes [B, G, N, E] after each row; return the slots in sight [B, G, L, E]. Rows
        with different numbers of nodes come as one, [1, G, all nodes, E]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows, lengths = self.cache.rows_on(self.keys.device), self.cache.lengths_in_use
        N = key_states.shape[2]
        computed_in = key_states.dtype
        key_states = key_states.to(self.keys.dtype)
        value_states = value_states.to(self.values.dtype)
        self.cache.reach(self.cache.rows_in_use, self.cache.counts_in_use or [N] * len(lengths))
        if (counts := self.cache.counts_in_use) is not None:
            rows_N, slots_N = self.cache.flat_targets(counts, self.keys.device)
            self.keys[rows_N, :, slots_N] = key_states[0].transpose(0, 1)
            self.values[rows_N, :, slots_N] = value_states[0].transpose(0, 1)
            N = max(counts)
        elif min(lengths) == max(lengths) and isinstance(rows, slice):
            self.keys[rows, :, lengths[0] : lengths[0] + N] = key_states
            self.values[rows, :, lengths[0] : lengths[0] + N] = value_states
        else:
            rows_B1, slots_BN = self.cache.targets(N, self.keys.device)
            self.keys[rows_B1, :, slots_BN] = key_states.transpose(1, 2)
            self.values[rows_B1, :, slots_BN] = value_states.transpose(1, 2)
        in_sight = max(lengths) + N
        keys, values = self.keys[rows, :, :in_sight], self.values[rows, :, :in_sight]
        return keys.to(computed_in), values.to(computed_in)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the keys [B, N, E] by which a layer chooses among its slots; return those of the
        slots in sight [B, L, E]."""
        if self._indexer is None:
            self._indexer = self.cache.more_slots()
        keys_B1NE = indexer_key_states[:, None]
        return self._indexer.update(keys_B1NE, keys_B1NE[..., :0])[0][:, 0]

    def get_seq_length(self) -> int:
        return max(self.cache.lengths_in_use)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.cache.num_positions


class TreeCache(Cache):
    """Keys and values of B rows with S slots each; `lengths[b]` tokens are committed in row b.

    A forward is over all rows, or over those that `using` names. `layers`: how many there are, or
    the layers themselves, of which some may have no slots. `dtype`: in which keys and values are
    stored, as they are computed unless given.
    """

    def __init__(
        self,
        layers: int | list[Any],
        batch_size: int,
        num_positions: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(layers, int):
            layers = [TreeCacheLayer(index, self) for index in range(layers)]
        Cache.__init__(self, layers=layers)  # whatever class of transformers' is mixed in
        self._slotted = [layer for layer in layers if isinstance(layer, TreeCacheLayer)]
        self._num_in_block = len(self._slotted)
        self.lengths = [0] * batch_size
        self.num_positions = num_positions
        self._dtype = dtype
        self._reached = [0] * batch_size  # slots of a row that may hold something
        self._max_reached = [0] * batch_size  # the most that there were: those take memory
        # One block for all layers of one shape, [layers, 2, B, G, S, E]: a commit is one gather.
        # Layers of another shape have tensors of their own in `_irregular`.
        self._block: Tensor | None = None
        self._irregular: list[tuple[Tensor, Tensor]] = []
        self._targets: tuple[Any, tuple[Tensor, Tensor]] | None = None
        self._in_use: Sequence[int] | None = None  # rows of the next forward; None: all
        self.counts_in_use: Sequence[int] | None = None  # their nodes, where these come as one row
        self._sent: tuple[Any, Tensor] | None = None
        self._sent_rows: tuple[Any, Tensor] | None = None

    @contextmanager
    def using(self, rows: Sequence[int], counts: Sequence[int] | None = None) -> Iterator[None]:
        """Let forwards be over these rows, in this order. Rows that lie side by side are read where
        they are, others are copied together by each layer. `counts`: how many nodes each row has,
        where the nodes of all rows come as one row."""
        self._in_use, self.counts_in_use = rows, counts
        try:
            yield
        finally:
            self._in_use = self.counts_in_use = None

    @property
    def rows_in_use(self) -> Sequence[int]:
        """The rows that the next forward is over."""
        return range(len(self.lengths)) if self._in_use is None else self._in_use

    @property
    def lengths_in_use(self) -> Sequence[int]:
        """The numbers of committed tokens of the rows in use."""
        return [self.lengths[row] for row in self.rows_in_use]

    def rows_on(self, device: torch.device) -> slice | Tensor:
        """The rows in use as an index of tensors on the device: a slice where they lie side by
        side, else numbers, which are sent there once for all layers."""
        rows = self.rows_in_use
        first, count = rows[0], len(rows)
        if all(row == first + offset for offset, row in enumerate(rows)):
            return slice(first, first + count)
        key = (tuple(rows), device)
        if self._sent_rows is None or self._sent_rows[0] != key:
            self._sent_rows = key, to_device(list(rows), device)
        return self._sent_rows[1]

    @property
    def block(self) -> Tensor | None:
        """Keys and values [layers, 2, B, G, S, E]; None before a prompt or where layers differ."""
        return None if self._irregular else self._block

    def block_of(self, num_heads: int, head_size: int, like: Tensor | None = None) -> Tensor | None:
        """The block, allocated now if the cache is empty, where all layers have one shape. `like`:
        a tensor of the dtype and on the device of its numbers, float32 on a CPU unless given."""
        if self._block is None and not self._irregular:
            like = torch.empty(0, dtype=torch.float32, device="cpu") if like is None else like
            empty = like.new_empty(len(self.lengths), num_heads, 0, head_size)
            for layer in self._slotted:
                layer.lazy_initialization(empty, empty)
        return self.block

    def device_lengths(self, device: torch.device) -> Tensor:
        """lengths_B of the rows in use on the device, sent there once for all who need them."""
        key = (tuple(self.lengths_in_use), device)
        if self._sent is None or self._sent[0] != key:
            self._sent = key, to_device(self.lengths_in_use, device)
        return self._sent[1]

    def targets(self, num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(rows_B1, slots_BN) that a forward of N nodes writes to, the same for all layers."""
        rows = self.rows_in_use
        key = (tuple(rows), tuple(self.lengths_in_use), num_nodes, device)
        if self._targets is None or self._targets[0] != key:
            rows_B1 = to_device(list(rows), device)[:, None]
            slots_BN = self.device_lengths(device)[:, None] + torch.arange(num_nodes, device=device)
            self._targets = key, (rows_B1, slots_BN)
        return self._targets[1]

    def flat_targets(self, counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """(rows_N, slots_N) that a forward writes the nodes of all rows to."""
        rows, lengths = self.rows_in_use, self.lengths_in_use
        key = (tuple(rows), tuple(lengths), tuple(counts), device)
        if self._targets is None or self._targets[0] != key:
            targets = [
                (row, length + node)
                for row, length, count in zip(rows, lengths, counts, strict=True)
                for node in range(count)
            ]
            rows_N, slots_N = to_device(targets, device).unbind(-1)
            self._targets = key, (rows_N, slots_N)
        return self._targets[1]

    def allocate(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Zeroed slots for layer `index` in the shape of its first keys and values."""
        B, (_, G, _, E) = len(self.lengths), keys.shape
        shape = (self._num_in_block, 2, B, G, self.num_positions, E)
        dtype = self._dtype or keys.dtype
        if values.shape == keys.shape:
            if self._block is None:
                self._block = lazy_zeros(shape, dtype, keys.device)
            if self._block.shape == shape:
                return self._block[index, 0], self._block[index, 1]
        values_shape = (B, values.shape[1], self.num_positions, values.shape[3])
        keys_BGSE = lazy_zeros((B, G, self.num_positions, E), dtype, keys.device)
        values_BGSE = lazy_zeros(values_shape, dtype, keys.device)
        self._irregular.append((keys_BGSE, values_BGSE))
        return keys_BGSE, values_BGSE

    def more_slots(self) -> TreeCacheLayer:
        """Add slots of a layer besides those of its keys and values."""
        self._slotted.append(TreeCacheLayer(len(self._slotted), self))
        return self._slotted[-1]

    def reach(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Note that so many nodes are written after what is committed in these rows."""
        lengths, reached = self.lengths, self._reached
        for row, count in zip(rows, counts, strict=True):
            if (slots := lengths[row] + count) > reached[row]:
                self._reach(row, slots)

    def _reach(self, row: int, slots: int) -> None:
        self._reached[row] = max(self._reached[row], slots)
        self._max_reached[row] = max(self._max_reached[row], slots)

    def check_room(self, num_nodes: int) -> None:
        self.check_room_for(self.lengths_in_use, [num_nodes] * len(self.lengths_in_use))

    def check_room_for(self, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Raises ContextLengthError where some of so many nodes after so many tokens do not fit."""
        for length, count in zip(lengths, counts, strict=True):
            if length + count > self.num_positions:
                raise ContextLengthError(
                    f"{count} nodes after {length} tokens need more than the cache's "
                    f"{self.num_positions} slots"
                )

    @no_gradients
    def commit(self, kept: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> None:
        """Keep these nodes (ascending) of each row's last forward; forget the other nodes. `rows`:
        whose they are, all rows' unless given."""
        rows = range(len(self.lengths)) if rows is None else rows
        lengths = self.lengths
        moves = [
            (row, lengths[row] + node, lengths[row] + index)
            for row, nodes in zip(rows, kept, strict=True)
            for index, node in enumerate(nodes)
            if node != index
        ]
        if moves:
            self._move(moves)
        for row, nodes in zip(rows, kept, strict=True):
            lengths[row] += len(nodes)

    @no_gradients
    def keep_first(self, row: int, length: int) -> None:
        """Forget all of a row but its first tokens."""
        self.lengths[row] = length
        self.clear_behind(row)

    @no_gradients
    def clear_behind(self, row: int) -> None:
        """Zero the slots of a row that were written behind what is committed: numbers that are
        hidden are still multiplied by 0, and NaN times 0 is NaN."""
        start, end = self.lengths[row], self._reached[row]
        if self._block is not None:
            self._block[:, :, row, :, start:end].zero_()
        for pair in self._irregular:
            for tensor in pair:
                tensor[row, :, start:end].zero_()
        self._reached[row] = start

    def forget(self, row: int) -> None:
        """Let nothing of a row be committed, whatever is in its slots."""
        self.lengths[row] = 0

    def usable(self, row: int, length: int) -> int:
        """How many of a row's first `length` tokens a text can go on after."""
        return length

    def mark(self, row: int, length: int) -> None:
        """Note that other texts may go on after `length` of a row's tokens, which are read next."""

    def num_unread(self, rows: Sequence[int]) -> int:
        """How many committed tokens the next forward over these rows reads besides its nodes."""
        return 0

    @no_gradients
    def copy_first(self, source: int, target: int, length: int) -> None:
        """Let row `target` begin with the first tokens of row `source`, and cache nothing else."""
        self.take_row(target, self, source, length)

    @no_gradients
    def take_row(self, target: int, other: "TreeCache", source: int, length: int) -> None:
        """Let row `target` begin with the first tokens of row `source` of another cache of the same
        model, in which something has been read."""
        self._reach(target, length)
        if self._block is not None and other._block is not None:
            self._block[:, :, target, :, :length] = other._block[:, :, source, :, :length]
        for kept, other_tensors in zip(self._irregular, other._irregular, strict=True):
            for tensor, from_tensor in zip(kept, other_tensors, strict=True):
                tensor[target, :, :length] = from_tensor[source, :, :length]
        self.keep_first(target, length)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that keys and values take."""
        return self._bytes(self._max_reached)

    def bytes_with(self, rows: Sequence[int]) -> int:
        """Bytes that keys and values would take in new memory, if only these rows held any."""
        return self._bytes([self._reached[row] for row in rows])

    def _bytes(self, reached: Sequence[int]) -> int:
        return sum(resident_bytes(tensor, reached) for tensor in self._tensors)

    def _move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy slots: (row, from, to), from the front of each row."""
        sent: dict[torch.device, Tensor] = {}
        for tensor in self._tensors:
            device = tensor.device
            if device.type == "cpu":
                _move_in_turn(tensor, moves)
                continue
            if device not in sent:
                sent[device] = to_device(moves, device)
            rows, source, target = sent[device].unbind(-1)
            tensor[..., rows, :, target, :] = tensor[..., rows, :, source, :]

    @property
    def _tensors(self) -> list[Tensor]:
        """All keys and values, each [..., B, G, S, E]."""
        block = [] if self._block is None else [self._block]
        return [*block, *(tensor for pair in self._irregular for tensor in pair)]

    @no_gradients
    def grow(self, num_positions: int, num_rows: int | None = None) -> None:
        """Room for `num_positions` tokens and nodes in each of `num_rows` rows, as many as there
        are unless given. What is in the cache stays, but for that in rows behind the last one.
        Nothing changes where memory is too small."""
        rows = len(self.lengths) if num_rows is None else num_rows
        new_rows = max(0, rows - len(self.lengths))

        def larger(old: Tensor) -> Tensor:
            *outer, _, G, _, E = old.shape
            new = lazy_zeros((*outer, rows, G, num_positions, E), old.dtype, old.device)
            for row, end in enumerate(self._reached[:rows]):
                new[..., row, :, :end, :] = old[..., row, :, :end, :]
            return new

        block = None if self._block is None else larger(self._block)
        irregular = {id(keys): (larger(keys), larger(values)) for keys, values in self._irregular}
        self.lengths = [*self.lengths[:rows], *[0] * new_rows]
        self._reached = [*self._reached[:rows], *[0] * new_rows]
        self._max_reached = list(self._reached)
        self._block, self._irregular = block, list(irregular.values())
        for layer in self._slotted:
            if id(layer.keys) in irregular:
                layer.keys, layer.values = irregular[id(layer.keys)]
            elif layer.keys is not None and self._block is not None:
                layer.keys, layer.values = self._block[layer.index, 0], self._block[layer.index, 1]
        self.num_positions = num_positions


def _move_in_turn(tensor: Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
    """Slot by slot, and by numpy, which takes less time for few numbers: torch gathers them all
    with its threads, which then keep a core busy that the next step in C++ waits for."""
    # numpy has no bfloat16; any numbers of that size will do.
    slots = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    for row, source, target in moves:
        slots[..., row, :, target, :] = slots[..., row, :, source, :]
