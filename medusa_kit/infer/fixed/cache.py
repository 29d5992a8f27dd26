"""The tree cache of fixed shapes: same slots, written and moved by indices that lie on the device.

Every forward returns all S slots; what lies behind a row's nodes is masked.

Shapes: B batch, G key/value heads, S slots, E head dim, N nodes with root, J nodes of a path.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.infer.tree_cache import TreeCache, TreeCacheLayer


class FixedCacheLayer(TreeCacheLayer):
    """One layer's slots, written where the cache was told to."""

    cache: "FixedCache"

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write N nodes [B, G, N, E] into the slots aimed at; return all slots [B, G, S, E]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows_B1, slots_BN = self.cache.aim
        self.keys[rows_B1, :, slots_BN] = key_states.transpose(1, 2)
        self.values[rows_B1, :, slots_BN] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.cache.num_slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.num_slots, 0


class FixedCache(TreeCache):
    """Slots that stay where they are, so that a graph may hold their addresses.

    `lengths` on the host are for the proof at load alone; a step has its own on the device.
    """

    def __init__(
        self, num_layers: int, batch_size: int, num_slots: int, device: torch.device
    ) -> None:
        super().__init__(num_layers, batch_size, num_slots)
        self.layers = [FixedCacheLayer(index, self) for index in range(num_layers)]
        self._rows_B1 = torch.arange(batch_size, device=device)[:, None]
        self.aim = (self._rows_B1, self._rows_B1)  # where a forward writes: rows, slots_BN

    def write_behind(self, lengths_B: Tensor, num_nodes: int) -> None:
        """Let the next forward write its nodes behind `lengths_B` tokens."""
        nodes_N = torch.arange(num_nodes, device=lengths_B.device)
        self.aim = (self._rows_B1, lengths_B[:, None] + nodes_N)

    def move(self, lengths_B: Tensor, nodes_BJ: Tensor) -> None:
        """Place node nodes_BJ[b, j] of the last forward at j; node j at j is left as it is."""
        places_J = torch.arange(nodes_BJ.shape[1], device=nodes_BJ.device)
        source, target = lengths_B[:, None] + nodes_BJ, lengths_B[:, None] + places_J
        rows = self._rows_B1
        if self._block is not None:
            self._block[:, :, rows, :, target] = self._block[:, :, rows, :, source]
        for pair in self._strays:
            for tensor in pair:
                tensor[rows, :, target] = tensor[rows, :, source]

    @torch.inference_mode()
    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """As the base class, by way of `move`."""
        device, J = self._rows_B1.device, max(len(nodes) for nodes in kept)
        filled = [[*nodes, *range(len(nodes), J)] for nodes in kept]
        self.move(torch.tensor(self.lengths, device=device), torch.tensor(filled, device=device))
        for row, nodes in enumerate(kept):
            self.lengths[row] += len(nodes)

    def first_rows(self, count: int) -> TreeCache:
        """The first `count` rows, empty, as an ordinary cache over the same memory: for prompts."""
        rows = TreeCache(len(self.layers), count, self.num_slots)
        rows._block = None if self._block is None else self._block[:, :, :count]
        for layer, own in zip(rows.layers, self.layers, strict=True):
            if own.keys is not None and own.values is not None:
                layer.keys, layer.values = own.keys[:count], own.values[:count]
                layer.is_initialized = True
        return rows
