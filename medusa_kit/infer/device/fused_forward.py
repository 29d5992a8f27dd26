"""A model's forward over nodes of any trees by few kernels: q, k, v and gate, up as one product
each, and between products kernels that do several things at once.

A layer takes four products and six other launches: rotation with the write into the cache,
attention over the prefix, attention over the tail with the merge, a norm after attention, the
activation, a norm after the MLP. Products are cuBLAS's, or where sums must not depend on the number
of nodes the kit's own.

Shapes: T nodes of all rows, N of a row at most, B rows of the cache, D hidden, H query heads, G
key/value heads, E head dim, M size of the MLP, S slots, W words of ancestors, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_kit.infer.attention.triton_backend import launch
from medusa_kit.infer.device.captured import power_of_two
from medusa_kit.infer.device.fused_model import FusedLayer, FusedModel, Matrix
from medusa_kit.infer.device.fused_tiles import (
    ACTIVATED,
    MAX_SPLITS,
    PRODUCT_NODES,
    TAIL,
    attention_tile,
    common_power,
    num_splits,
    product_tile,
)

Run = Callable[..., None]  # kernel, grid, arguments, options


class Nodes(NamedTuple):
    """Trees after the rows of a cache, on the device. `rows_T`: -1 of nodes that only fill up.
    `positions_T`: for the rotation. `firsts_B` and `counts_B`: where the nodes of each row are."""

    tokens_T: Tensor
    rows_T: Tensor
    slots_T: Tensor
    depths_T: Tensor
    positions_T: Tensor
    words_TW: Tensor
    firsts_B: Tensor
    counts_B: Tensor
    lengths_B: Tensor
    row_nodes: int  # of a row at most
    in_sight: int  # slots of a row at most


class FusedForward:
    """`exact`: a node gets the same bits whatever is computed beside it. `run` launches kernels."""

    def __init__(self, model: FusedModel, exact: bool, run: Run = launch) -> None:
        self.model, self.exact, self._run = model, exact, run

    def __call__(self, nodes: Nodes, block: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden_TD, logits_TV before the model's scale) over a cache [layers, 2, B, G, S, E]."""
        parts = self.model.parts
        stream_TD = parts.embedding(nodes.tokens_T)
        rotations = self.model.rotations(stream_TD, nodes.positions_T)
        places_TC = self._places(nodes)
        first = self.model.layers[0].parts.input_norm
        normed_TD = self._norm(stream_TD, None, None, first)
        for number, layer in enumerate(self.model.layers):
            rotation = rotations[self.model.rotary_type(layer.parts)]
            attended = self._attention(layer, normed_TD, rotation, nodes, places_TC, block[number])
            own = layer.parts
            after, before = own.after_attention_norm, own.before_mlp_norm
            normed_TD = self._norm(stream_TD, self._product(layer.out, attended), after, before)
            computed_TD = self._mlp(layer, normed_TD)
            last = number + 1 == len(self.model.layers)
            following = parts.final_norm if last else self.model.layers[number + 1].parts.input_norm
            normed_TD = self._norm(stream_TD, computed_TD, own.after_mlp_norm, following)
        return normed_TD, self._product(self.model.output, normed_TD)

    def _norm(
        self, stream_TD: Tensor, added: Tensor | None, after: Tensor | None, before: Tensor
    ) -> Tensor:
        from medusa_kit.infer.device.fused.norms import add_norm_kernel

        out_TD = torch.empty_like(stream_TD)
        T, D = stream_TD.shape
        self._run(
            add_norm_kernel, (T,), stream_TD if added is None else added, stream_TD,
            before if after is None else after, before, out_TD, D, self.model.parts.norm_epsilon,
            ADDS=added is not None, SANDWICH=after is not None,
            ROUNDS_FIRST=self.model.rounds_first, BLOCK=power_of_two(D),
            num_warps=8 if D >= 2048 else 4,
        )  # fmt: skip
        return out_TD

    def _product(self, matrix: Matrix, inputs_TK: Tensor) -> Tensor:
        if not self.exact:
            return F.linear(inputs_TK, *matrix)
        from medusa_kit.infer.device.fused.product import product_kernel

        weight_NK, bias_N = matrix
        (N, K), T = weight_NK.shape, len(inputs_TK)
        out_TN = inputs_TK.new_empty(T, N)
        tile = product_tile(N, inputs_TK.element_size())
        grid = (-(-T // PRODUCT_NODES), -(-N // tile["BLOCK_N"]))
        self._run(
            product_kernel, grid, inputs_TK, weight_NK, weight_NK if bias_N is None else bias_N,
            out_TN, T, K, N, HAS_BIAS=bias_N is not None, BLOCK_T=PRODUCT_NODES, **tile,
        )  # fmt: skip
        return out_TN

    def _places(self, nodes: Nodes) -> Tensor:
        from medusa_kit.infer.device.fused.attention import places_kernel

        T, W = nodes.words_TW.shape
        places_TC = torch.empty(T, TAIL, dtype=torch.int32, device=nodes.words_TW.device)
        self._run(
            places_kernel, (T,), nodes.rows_T, nodes.depths_T, nodes.words_TW, nodes.firsts_B,
            nodes.lengths_B, places_TC, W, nodes.row_nodes, BLOCK=64, num_warps=1,
        )  # fmt: skip
        return places_TC

    def _attention(
        self,
        layer: FusedLayer,
        normed_TD: Tensor,
        rotation: list[Tensor],
        nodes: Nodes,
        places_TC: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """What a layer's heads give [T, H·E]. `slots`: its keys and values [2, B, G, S, E]."""
        qkv = self._product(layer.qkv, normed_TD)
        keys_BGSE, values_BGSE = slots
        queries = self._rotated(layer, qkv, rotation, nodes, keys_BGSE, values_BGSE)
        return self._attend(layer, queries, keys_BGSE, values_BGSE, nodes, places_TC)

    def _rotated(
        self,
        layer: FusedLayer,
        qkv: Tensor,
        rotation: list[Tensor],
        nodes: Nodes,
        keys_BGSE: Tensor,
        values_BGSE: Tensor,
    ) -> Tensor:
        from medusa_kit.infer.device.fused.rope import rope_kernel

        parts, own = self.model.parts, layer.parts
        H, G, E, T = parts.query_heads, parts.kv_heads, parts.head_size, len(qkv)
        heads = common_power(H, G)
        queries = qkv.new_empty(T, H * E)
        norms = [qkv if norm is None else norm for norm in (own.q_norm, own.k_norm)]
        self._run(
            rope_kernel, (T, (H + 2 * G) // heads), qkv, *norms, *rotation, nodes.rows_T,
            nodes.slots_T, queries, keys_BGSE, values_BGSE, keys_BGSE.shape[2],
            parts.norm_epsilon, H=H, G=G, E=E, HEADS=heads, HALF=power_of_two(E // 2),
            QK_NORM=own.q_norm is not None, ROUNDS_FIRST=self.model.rounds_first, num_warps=2,
        )  # fmt: skip
        return queries

    def _attend(
        self,
        layer: FusedLayer,
        queries: Tensor,
        keys_BGSE: Tensor,
        values_BGSE: Tensor,
        nodes: Nodes,
        places_TC: Tensor,
    ) -> Tensor:
        from medusa_kit.infer.device.fused.attention import prefix_kernel, tail_kernel

        parts, T = self.model.parts, len(queries)
        H, G, E = parts.query_heads, parts.kv_heads, parts.head_size
        B, S, M = len(keys_BGSE), keys_BGSE.shape[2], H // G
        splits, window = num_splits(nodes.in_sight), layer.parts.window
        partials = torch.empty(splits, T, H, E, dtype=torch.float32, device=queries.device)
        lses = torch.empty(splits, T, H, dtype=torch.float32, device=queries.device)
        sizes = {"H": H, "G": G, "E": E, "HAS_WINDOW": window > 0}
        rows, tile = attention_tile(E, queries.element_size())
        if splits:
            self._run(
                prefix_kernel, (-(-nodes.row_nodes * M // rows), B * G, splits), queries,
                keys_BGSE, values_BGSE, nodes.depths_T, nodes.firsts_B, nodes.counts_B,
                nodes.lengths_B, partials, lses, T, S, parts.scale, window, **sizes,
                BLOCK_R=rows, **tile,
            )  # fmt: skip
        out = torch.empty_like(queries)
        self._run(
            tail_kernel, (T, G), queries, keys_BGSE, values_BGSE, places_TC, nodes.rows_T,
            nodes.depths_T, nodes.lengths_B, partials, lses, out, T, S, splits, parts.scale,
            window, **sizes, SPLITS=MAX_SPLITS, BLOCK_M=max(16, power_of_two(M)), **tile,
        )  # fmt: skip
        return out

    def _mlp(self, layer: FusedLayer, normed_TD: Tensor) -> Tensor:
        from medusa_kit.infer.device.fused.activation import activation_kernel

        gate_up = self._product(layer.gate_up, normed_TD)
        T, M = len(gate_up), gate_up.shape[1] // 2
        activated_TM = gate_up.new_empty(T, M)
        block = min(ACTIVATED, power_of_two(M))
        self._run(
            activation_kernel, (T, -(-M // block)), gate_up, activated_TM, M,
            GELU=self.model.parts.gelu, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return self._product(layer.down, activated_TM)
