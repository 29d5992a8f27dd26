"""The tree cache of fixed shapes: its slots are written and moved by indices on the device.

Every forward returns all S slots; those after a row's nodes are masked.

Shapes: B batch, G key/value heads, S slots, E head dim, N nodes with root, J nodes of a path.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.infer.tree_cache import TreeCache, TreeCacheLayer
from medusa_kit.no_gradients import no_gradients


class StaticTreeCacheLayer(TreeCacheLayer):
    """One layer's slots, written where the cache says."""

    cache: "StaticTreeCache"

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write N nodes [B, G, N, E] to the cache's target; return all slots [B, G, S, E]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows_B1, slots_BN = self.cache.target
        self.keys[rows_B1, :, slots_BN] = key_states.transpose(1, 2)
        self.values[rows_B1, :, slots_BN] = value_states.transpose(1, 2)
        rows = self.cache.rows
        return self.keys[rows], self.values[rows]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        raise NotImplementedError("keys of an index have no slots of fixed shapes")

    def get_seq_length(self) -> int:
        return self.cache.num_slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.num_slots, 0


class StaticTreeCache(TreeCache):
    """Slots that stay where they are in memory, so that a graph may hold their addresses.

    `lengths` on the host are for the self-check only; a step keeps its own on the device.
    """

    def __init__(
        self, num_layers: int, batch_size: int, num_slots: int, device: torch.device
    ) -> None:
        super().__init__(num_layers, batch_size, num_slots)
        self.layers = [StaticTreeCacheLayer(index, self) for index in range(num_layers)]
        self._rows_B1 = torch.arange(batch_size, device=device)[:, None]
        self.target = (self._rows_B1, self._rows_B1)  # where a forward writes: rows, slots_BN

    def write_after(self, lengths_B: Tensor, num_nodes: int) -> None:
        """Let the next forward write its nodes after `lengths_B` tokens."""
        nodes_N = torch.arange(num_nodes, device=lengths_B.device)
        self.target = (self._rows_B1[self.rows], lengths_B[:, None] + nodes_N)

    def move(self, lengths_B: Tensor, nodes_BJ: Tensor) -> None:
        """Move node nodes_BJ[b, j] of the last forward to place j; node j itself stays there."""
        places_J = torch.arange(nodes_BJ.shape[1], device=nodes_BJ.device)
        source, target = lengths_B[:, None] + nodes_BJ, lengths_B[:, None] + places_J
        rows = self._rows_B1
        if self._block is not None:
            self._block[:, :, rows, :, target] = self._block[:, :, rows, :, source]
        for pair in self._strays:
            for tensor in pair:
                tensor[rows, :, target] = tensor[rows, :, source]

    def copy_rows(self, other: "StaticTreeCache", places: Sequence[int]) -> None:
        """Copy the rows in these places of `other` to the first rows here, directly and as far as
        both have slots. Slots that `other` lacks are zeroed."""
        shared = min(self.num_slots, other.num_slots)
        for own, others in zip(self._tensors(), other._tensors(), strict=True):
            for row, place in enumerate(places):
                own[row, :, :shared].copy_(others[place, :, :shared])
                own[row, :, shared:].zero_()

    def keep_first(self, row: int, length: int) -> None:
        self._reached[row] = self.num_slots  # a graph writes where the host does not see it
        super().keep_first(row, length)

    def fill_at_random(self) -> None:
        """Fill every slot, with the same numbers each time."""
        generator = torch.Generator(self._rows_B1.device).manual_seed(0)
        for tensor in self._tensors():
            tensor.normal_(generator=generator)

    def clear(self) -> None:
        for tensor in self._tensors():
            tensor.zero_()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def free(self) -> None:
        """Drop all slots."""
        self._block, self._strays, self.layers = None, [], []

    def _tensors(self) -> Iterator[Tensor]:
        """Keys and values of every layer, [B, G, S, E]."""
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                yield layer.keys
                yield layer.values

    @no_gradients
    def commit(self, kept: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> None:
        """As the base class, by way of `move`."""
        if rows is not None:
            of_row = dict(zip(rows, kept, strict=True))
            kept = [of_row.get(row, ()) for row in range(len(self.lengths))]
        device, J = self._rows_B1.device, max(len(nodes) for nodes in kept)
        filled = [[*nodes, *range(len(nodes), J)] for nodes in kept]
        self.move(torch.tensor(self.lengths, device=device), torch.tensor(filled, device=device))
        for row, nodes in enumerate(kept):
            self.lengths[row] += len(nodes)
