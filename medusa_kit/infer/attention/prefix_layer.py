"""The prefix layer of heads over the nodes of a forward, with tree attention.

Its keys and values are the last layer of the tree cache, so committing, copying and forgetting
tokens is what it is for any layer.

Shapes: B batch, N nodes with root, D hidden, H query heads, G key/value heads, E head size.
"""

from torch import Tensor, cat

from medusa_kit.heads.prefix_layer import PrefixLayer
from medusa_kit.infer.attention.backend import AttentionCall
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import TreeStep


def with_outputs(
    layer: PrefixLayer, hidden_BND: Tensor, positions_BN: Tensor, cache: TreeCache, step: TreeStep
) -> Tensor:
    """[hidden; output] of each node, 2 D wide. The nodes are in the cache, not committed. Nodes
    come as they do in a forward of the base (`TreeStep`)."""

    def attend(q_BHNE: Tensor, k_BGNE: Tensor, v_BGNE: Tensor) -> Tensor:
        keys, values = cache.update(k_BGNE, v_BGNE, len(cache.layers) - 1)
        queries = q_BHNE if step.at_N is None else step.padded(q_BHNE)
        call = AttentionCall(queries, keys, values, step, q_BHNE.shape[-1] ** -0.5)
        return step.unpadded((step.attend or tree_sdpa)(call)).transpose(1, 2)

    return cat([hidden_BND, layer(hidden_BND, positions_BN, attend)], dim=-1)
