"""The prefix layer of heads (heads/prefix_layer.py) as C++ steps run it: one more layer after the
base's own.

Drafts need not be exact, so its weights are rounded to eight bits where their rows can be cut into
groups. The base's numbers do not depend on it.

Shapes: O outputs, I inputs, E head dim, P positions.
"""

import ctypes

import torch
from torch import Tensor

from medusa_kit.heads.prefix_layer import NORM_EPSILON, PrefixLayer, inverse_frequencies
from medusa_kit.infer.cpu import kernels
from medusa_kit.infer.cpu.describe import Unsupported
from medusa_kit.infer.cpu.int8_weights import packed_rounded
from medusa_kit.infer.packed.model import PackedModel, cosines_and_sines
from medusa_kit.infer.packed.packing import interleaved


class PackedPrefix:
    """A copy of a frozen layer's weights, for steps of the model with these packed weights.

    Raises Unsupported where the model's cache has no place for its keys and values.
    """

    @torch.no_grad()
    def __init__(self, layer: PrefixLayer, packed: PackedModel) -> None:
        sizes, hidden = layer.sizes, layer.norm.weight.numel()
        own = (hidden, sizes.kv_heads, sizes.head_size)
        theirs = (packed.info["hidden_size"], packed.sizes.kv_heads, packed.sizes.head_size)
        if own != theirs:
            raise Unsupported(
                f"a prefix layer whose hidden size, key/value heads and their size are {own}; "
                f"those of the base are {theirs}"
            )
        self.matrices = [
            packed_rounded(weight_OI)
            for weight_OI in (
                torch.cat([layer.wq.weight, layer.wk.weight, layer.wv.weight]),
                layer.wo.weight,
                interleaved(layer.w1.weight, layer.w3.weight),
                layer.w2.weight,
            )
        ]
        norms = (layer.attention_norm, layer.mlp_norm, layer.norm)
        self._norms = [norm.weight.detach().float().clone() for norm in norms]
        self._inverse = inverse_frequencies(sizes.head_size)
        before, between, after = (norm.data_ptr() for norm in self._norms)
        qkv, out, gate_up, down = (matrix.struct for matrix in self.matrices)
        table = packed.rotary_up_to(1).shape[0] // 2  # after the model's own
        self._layer = kernels.Layer(
            qkv, out, gate_up, down, kernels.Matrix(), before, 0, between, 0, 0, 0, table, 0
        )
        self.struct = kernels.Decoder(
            hidden, sizes.mlp, sizes.query_heads, sizes.kv_heads, sizes.head_size,
            sizes.head_size, 1, 0, NORM_EPSILON, sizes.head_size**-0.5,
            ctypes.pointer(self._layer), after, kernels.Matrix(),
        )  # fmt: skip

    def rotary_up_to(self, length: int) -> Tensor:
        """Cosines and sines of the first `length` positions [2, P, E]."""
        return torch.cat(cosines_and_sines(length, self._inverse, 1.0))
