"""One layer run over chains of hidden states, each row with keys and values of its own.

Rows come and go, and have chains of different length. What a layer reads is not what the base
reads, so its cache is its own, with the first place at any position of the row's text.

Shapes: B rows, N nodes of the longest chain, T nodes of a row's chain, D hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.drafters.slots import Slots
from medusa_kit.infer.attention.step import TreeStep, attach_holder
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.transfer import to_device

ROOM = 256  # extra slots in a new cache
# (hidden_BND, tokens_BN, positions_BN, mask, cache) -> hidden_BND
Forward = Callable[[Tensor, Tensor, Tensor, Tensor, "LayerCache"], Tensor]


class LayerCache(TreeCache):
    """The KV cache of one layer, whatever index that layer goes by."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **more: Any) -> Any:
        return super().update(keys, values, 0, *args, **more)


class LayerRows:
    """One layer (`forward`) with a cache for each row; `modules` are those with attention."""

    def __init__(self, verifier: Verifier, modules: Any, forward: Forward) -> None:
        self.verifier, self.forward = verifier, forward
        self._holder = attach_holder(modules)
        self._holder.mask_form = verifier.own_attention
        self._slots = Slots()
        self._firsts: list[int] = []  # the position of each row's first node
        self._cache: LayerCache | None = None

    def begin(self) -> int:
        """The row of a request that begins."""
        if self._slots.needs_new:
            if self._cache is not None:  # first: where memory is too small, all is as it was
                self._cache.grow(self._cache.num_positions, self._slots.count + 1)
            self._firsts.append(0)
        return self._slots.take()

    def finish(self, row: int) -> None:
        """Its request has ended."""
        self._slots.give_back(row)
        if self._slots.num_taken == 0:
            self._cache = None
        elif self._cache is not None:
            self._cache.keep_first(row, 0)

    @property
    def lengths(self) -> list[int]:
        """Nodes that the cache holds of each row."""
        return [0] * len(self._firsts) if self._cache is None else list(self._cache.lengths)

    def forget_after(self, lengths: Sequence[int]) -> None:
        """Keep so many nodes of each row."""
        if self._cache is not None:
            self._cache.lengths = list(lengths)

    def read(
        self,
        rows: Sequence[int],
        hidden: Sequence[Tensor],
        tokens: Sequence[Sequence[int]],
        ends: Sequence[int],
    ) -> list[Tensor]:
        """hidden_TD of the layer after these nodes of these rows, which the cache then holds.
        `hidden`: (T, D) that it reads beside each row's tokens; `ends`: each last node's position.
        """
        if not rows:
            return []
        device, counts = self.verifier.base.device, [len(one) for one in tokens]
        cache = self._room_for(max(counts))
        for row, count, end in zip(rows, counts, ends, strict=True):
            if cache.lengths[row] == 0:
                self._firsts[row] = end + 1 - count
        tokens_BN, depths_BN, sees_BNN = Forest.chains(tokens, device).padded()
        N = tokens_BN.shape[1]
        hidden_BND = torch.stack([_padded(one_TD, N) for one_TD in hidden])
        firsts_B1 = to_device([self._firsts[row] for row in rows], device)[:, None]
        with cache.using(rows):
            lengths_B = cache.device_lengths(device)
            attend = self.verifier.attention.attend
            lengths = tuple(cache.lengths_in_use)
            step = TreeStep(lengths, depths_BN, sees_BNN, attend=attend, lengths_B=lengths_B)
            last = self.verifier.base.info.context_length - 1
            positions_BN = (firsts_B1 + lengths_B[:, None] + depths_BN).clamp_max(last)
            out_BND = self._run(step, hidden_BND, tokens_BN, positions_BN, cache)
        cache.commit([range(count) for count in counts], rows)
        return [one_ND[:count] for one_ND, count in zip(out_BND, counts, strict=True)]

    def _run(
        self,
        step: TreeStep,
        hidden_BND: Tensor,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        cache: LayerCache,
    ) -> Tensor:
        with self.verifier.lock():
            self._holder.step = step
            try:
                mask = self._holder.attention_mask(hidden_BND.dtype)
                return self.forward(hidden_BND, tokens_BN, positions_BN, mask, cache)
            finally:
                self._holder.step = None

    def _room_for(self, num_nodes: int) -> LayerCache:
        """The cache, with room for so many more nodes in each row."""
        if self._cache is None:
            self._cache = LayerCache(1, len(self._firsts), num_nodes + ROOM)
        needed = max(self._cache.lengths) + num_nodes
        if needed > self._cache.num_positions:
            self._cache.grow(max(needed + ROOM, self._cache.num_positions * 3 // 2))
        return self._cache


def _padded(hidden_TD: Tensor, num_nodes: int) -> Tensor:
    return torch.nn.functional.pad(hidden_TD, (0, 0, 0, num_nodes - len(hidden_TD)))
