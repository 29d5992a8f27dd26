"""The cache of MiniMax, whose model takes none but transformers' own class for it."""

from typing import Any

from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from medusa_kit.infer.chains.cache import ChainCache


class LightningCache(ChainCache, MiniMaxCache):
    """A chain cache that the model takes for its own. Its states are asked for and put back under
    other names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ChainCache.__init__(self, *args, **kwargs)
        self.linear_cache: list[Tensor] = []  # what the other class keeps them in

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.layers[layer_idx].recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.layers[layer_idx].recurrent_states[0] = linear_cache
