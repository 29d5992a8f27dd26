"""The KV cache whose slots stay where they are in memory, so that a captured forward may use them.

Outside of such forwards it is an ordinary tree cache: prompts are read into it and nodes committed
in the same way.

Shapes: B rows of the cache, G key/value heads, S slots, L of them in sight, E head dim, T nodes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from torch import Tensor

from medusa_kit.infer.tree_cache import TreeCache, TreeCacheLayer

MIN_SLOTS = 256


class Target(NamedTuple):
    """Where a forward writes its T nodes, on the device, and how many slots it sees of each row."""

    rows_T: Tensor
    slots_T: Tensor
    in_sight: int


class FixedCacheLayer(TreeCacheLayer):
    """One layer's slots, written where the cache's target says while there is one."""

    @property
    def cache(self) -> "FixedCache":
        return cast(FixedCache, self._cache())

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write nodes, [1, G, T, E] or [B, G, T / B, E]; return slots in sight [B, G, L, E]."""
        target = self.cache.target
        if target is None:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        for slots, states in ((self.keys, key_states), (self.values, value_states)):
            slots[target.rows_T, :, target.slots_T] = states.transpose(1, 2).flatten(0, 1)
        return self.keys[:, :, : target.in_sight], self.values[:, :, : target.in_sight]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if self.cache.target is not None:
            raise NotImplementedError("keys of an index have no slots of fixed shapes")
        return super().update_indexer(indexer_key_states)

    def get_seq_length(self) -> int:
        target = self.cache.target
        return super().get_seq_length() if target is None else target.in_sight

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        target = self.cache.target
        return super().get_mask_sizes(query_length) if target is None else (target.in_sight, 0)


class FixedCache(TreeCache):
    """A tree cache with the forwards that were captured over it, which end where its memory does.

    Slots are rounded up to a power of two, but for what can never be used (`max_slots`), so that
    longer requests seldom need other memory.
    """

    def __init__(
        self, num_layers: int, batch_size: int, num_positions: int, max_slots: int
    ) -> None:
        self._max_slots = max_slots
        layers = [FixedCacheLayer(index, self) for index in range(num_layers)]
        super().__init__(layers, batch_size, self._rounded(num_positions))
        self.target: Target | None = None
        self.forwards: dict[Any, Any] = {}

    @contextmanager
    def writing(self, target: Target) -> Iterator[None]:
        """Let a forward write its nodes there."""
        self.target = target
        try:
            yield
        finally:
            self.target = None

    def grow(self, num_positions: int, num_rows: int | None = None) -> None:
        super().grow(self._rounded(num_positions), num_rows)
        self.forwards.clear()

    def _rounded(self, num_positions: int) -> int:
        power = max(MIN_SLOTS, 1 << (num_positions - 1).bit_length())
        return max(num_positions, min(power, self._max_slots))
