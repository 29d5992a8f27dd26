"""Cache layers of a model that carries states: transformers' own, with a state for each row.

A forward of transformers changes a layer's states in place. So before it the layer gets copies of
the kept states of the rows in use, and after it the new ones are taken out. Which of them a row
keeps is the cache's to decide (cache.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.tree_cache import TreeCache, TreeCacheLayer

NOTHING: Any = getattr(cache_utils, "DummyLayer", ())  # what keeps nothing; 5.17 has none
LayerState = tuple[Tensor | None, ...]  # [1, ...] each: convolutions, then recurrent states


class StateLayer(LinearAttentionLayer):
    """The states of one layer, of the rows in use while a forward runs."""

    def __init__(self, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def begin(self, states: Sequence[LayerState] | None) -> None:
        """Let a forward go on from these rows' states; None: their texts begin with it."""
        joined: Sequence[Tensor | None] = [None] * (2 * self.number_of_states)
        if states is not None:
            joined = [_joined(parts) for parts in zip(*states, strict=True)]
        for index in range(self.number_of_states):
            conv, recurrent = joined[index], joined[self.number_of_states + index]
            self.conv_states[index], self.recurrent_states[index] = conv, recurrent
            self.is_conv_states_initialized[index] = conv is not None
            self.is_recurrent_states_initialized[index] = recurrent is not None
            self.has_previous_state[index] = states is not None

    def end(self, num_rows: int) -> list[LayerState]:
        """The states of each row after the forward; the layer forgets them."""
        states = [*self.conv_states.values(), *self.recurrent_states.values()]
        self.begin(None)
        parts = [[None] * num_rows if state is None else _split(state) for state in states]
        return list(zip(*parts, strict=True))


class StateAndSlotsLayer(StateLayer, TreeCacheLayer):
    """States of a layer that has attention too, whose keys and values are in slots."""

    def __init__(self, number_of_states: int, index: int, cache: TreeCache) -> None:
        TreeCacheLayer.__init__(self, index, cache)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize slots, which come as two positional arguments, or a state, which is named."""
        kind = TreeCacheLayer if len(args) == 2 else StateLayer
        kind.lazy_initialization(self, *args, **kwargs)


def layers_for(config: Any, cache: TreeCache) -> list[Any]:
    """A layer for each of the model's, by what transformers' own cache has for it.

    Raises IncompatibleBaseError for layers of another kind.
    """
    layers, num_slotted = list[Any](), 0
    for layer in DynamicCache(config=config).layers:
        slotted, states = (
            isinstance(layer, CacheLayerMixin),
            isinstance(layer, LinearAttentionCacheLayerMixin),
        )
        if slotted and states:
            layers.append(StateAndSlotsLayer(layer.number_of_states, num_slotted, cache))
        elif states:
            layers.append(StateLayer(layer.number_of_states))
        elif slotted:
            layers.append(TreeCacheLayer(num_slotted, cache))
        elif isinstance(layer, NOTHING):
            layers.append(layer)
        else:
            raise IncompatibleBaseError(
                f"transformers keeps {type(layer).__name__} for {config.model_type}, which draft "
                "tokens cannot be taken back from",
                hint="transformers' own generate serves this model",
            )
        num_slotted += slotted
    return layers


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """A copy of these rows' states as one tensor."""
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None])


def _split(states: Tensor) -> list[Tensor]:
    """A tensor for each row; with several rows copies, so that one kept does not hold them all."""
    rows = states.split(1)
    return [row.clone() for row in rows] if len(rows) > 1 else list(rows)
