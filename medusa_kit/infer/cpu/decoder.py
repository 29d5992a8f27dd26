"""A base model's verify step in one C++ call, for families that `describe` knows, on a CPU.

Prompts are trees without branches, so they run here too, in pieces. The model itself is unchanged
and can take over any forward, since both write the same cache.

Shapes: B batch, N nodes with root, M of them kept, D hidden, V vocabulary, E head dim,
T rotary tables, P positions, R likeliest tokens.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit import console
from medusa_kit.base.files import gguf_source
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.cpu import kernels
from medusa_kit.infer.cpu.describe import LayerParts, ModelParts, Unsupported, describe
from medusa_kit.infer.cpu.gguf_blocks import GGUFBlocks, equal_blocks
from medusa_kit.infer.cpu.mkl_linear import SHARE_OF_MEMORY, free_memory
from medusa_kit.infer.cpu.packing import (
    Blocks,
    PackedMatrix,
    alike,
    interleaved,
    interleaved_blocks,
    joined_blocks,
    pack,
)
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import Nodes, NodeScores, TreeStep

WORK_OF_ONE_THREAD = 1 << 15  # elements: torch shares more than these among its threads
RANKED = 8  # likeliest tokens returned for each node: a by-product of finding the argmax


class NativeDecoder:
    """Runs up to MAX_ROWS nodes at once. Build with `native_decoder`."""

    def __init__(self, base: BaseModel, gguf: Path | None = None) -> None:
        """Raises Unsupported where the model cannot be run this way."""
        loaded = kernels.load_library()
        if loaded is None:
            raise Unsupported("the C++ kernels are not available")
        self.base = base
        self._library = loaded
        self.parts = describe(base.model)
        self._packer = _Packer(base, GGUFBlocks(gguf) if gguf else None)
        self._tables = _tables(self.parts)
        self._rotary_2TPE = torch.empty(0, 0)
        self._cache_shape = (self.parts.kv_heads, self.parts.head_size)
        self._alive: list[Any] = []  # what the structures point to
        output = self.parts.output
        self.output_blocks = self._packer.blocks(output)
        packed = pack(output.weight.detach(), output.bias, self.output_blocks)
        self.output = self._packer.keep(packed)
        self._struct = self._build()
        sizes = [matrix.struct for matrix in self._packer.matrices]
        self._num_weights = sum(struct.outputs * struct.inputs for struct in sizes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return sum(matrix.num_bytes for matrix in self._packer.matrices)

    @property
    def summary(self) -> str:
        """Instruction set and how the weights are stored, for reports."""
        forms = sorted({matrix.kind for matrix in self._packer.matrices})
        size = f"{self.weight_bytes / 1e6:,.0f} MB of weights as {', '.join(forms)}"
        return f"{self._library.mk_isa().decode()}, {size}"

    def takes(self, cache: TreeCache, num_nodes: int) -> bool:
        """Whether a forward of so many nodes can run in C++: few, and a cache of one shape."""
        return num_nodes <= kernels.MAX_ROWS and cache.block_of(*self._cache_shape) is not None

    def prompt_chunk(self, num_rows: int) -> int:
        """How many tokens of each of `num_rows` prompts one call takes; 0 for too many prompts."""
        return kernels.MAX_ROWS // num_rows

    def forward(
        self,
        cache: TreeCache,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        step: TreeStep,
        keep_M: Tensor | None = None,
    ) -> NodeScores:
        """Scores of the nodes `keep_M` (all) of every row, where rows have equally many nodes."""
        B, N = tokens_BN.shape
        nodes_M = torch.arange(N) if keep_M is None else keep_M
        kept_M = (torch.arange(0, B * N, N)[:, None] + nodes_M).flatten()
        depths_N, sees = step.depths_BN.flatten(), step.sees_BNN.flatten()
        nodes = Nodes(tokens_BN.flatten(), depths_N, sees, [N] * B)
        rows, positions_N = cache.rows_in_use, positions_BN.flatten()
        scores = self.score(cache, nodes, positions_N, rows, kept_M)
        return NodeScores(*(part.view(B, len(nodes_M), -1) for part in scores))

    def score(
        self,
        cache: TreeCache,
        nodes: Nodes,
        positions_N: Tensor,
        rows: Sequence[int],
        keep_M: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden_MD, logits_MV, ranked_MR) of the nodes `keep_M` (all) of trees after these rows
        of the cache. Several threads may call; the kernels take turns. A node's bits are the same
        in a step's tree as in a piece of a prompt.
        """
        keep_M = torch.arange(len(nodes.tokens_N)) if keep_M is None else keep_M
        M, info = len(keep_M), self.base.info
        embeddings_ND = self._embeddings(nodes.tokens_N)
        rotary_2TPE, positions_N = self._rotary(positions_N), positions_N.contiguous()
        hidden_MD = torch.empty(M, info.hidden_size)
        logits_MV = torch.empty(M, info.vocab_size)
        ranked_MR = torch.empty(M, min(RANKED, info.vocab_size), dtype=torch.int64)
        starts = torch.tensor([0, *accumulate(nodes.counts)])
        rows_B = torch.tensor(list(rows))
        lengths_B = torch.tensor([cache.lengths[row] for row in rows])
        depths_N, sees = nodes.depths_N.contiguous(), nodes.sees.contiguous()
        block = cache.block_of(*self._cache_shape)
        assert block is not None
        cache.reach(rows, nodes.counts)
        for layer, layer_parts in self._windowed:
            layer.window = layer_parts.window
        struct = kernels.Step(
            len(rows), len(nodes.tokens_N), len(cache.lengths), cache.num_slots,
            embeddings_ND.data_ptr(), rotary_2TPE.data_ptr(), rotary_2TPE.shape[1],
            positions_N.data_ptr(), starts.data_ptr(), rows_B.data_ptr(), lengths_B.data_ptr(),
            depths_N.data_ptr(), sees.data_ptr(), block.data_ptr(),
            M, keep_M.data_ptr(), hidden_MD.data_ptr(), logits_MV.data_ptr(),
            ranked_MR.shape[1], ranked_MR.data_ptr(), block.dtype == torch.float16,
        )  # fmt: skip
        threads = kernels.threads_for(len(nodes.tokens_N) * self._num_weights)
        self._library.mk_step(ctypes.byref(self._struct), ctypes.byref(struct), threads)
        return hidden_MD, self.base.scale_logits(logits_MV), ranked_MR

    def _embeddings(self, tokens_N: Tensor) -> Tensor:
        """In parts that torch computes with one thread: its others would spin for milliseconds
        after it, on the cores that the kernels' threads need."""
        rows = max(WORK_OF_ONE_THREAD // self.base.info.hidden_size, 1)
        embed = self.base.model.get_input_embeddings()
        return torch.cat([embed(part) for part in tokens_N.split(rows)])

    def _rotary(self, positions_N: Tensor) -> Tensor:
        """Cosines and sines of all positions up to these, from the model's own rotary embedding."""
        last, rotary_2TPE = int(positions_N.max()), self._rotary_2TPE
        if last >= rotary_2TPE.shape[1]:
            self._rotary_2TPE = rotary_2TPE = self._rotary_up_to(max(2 * last, 256))
        return rotary_2TPE

    def _rotary_up_to(self, length: int) -> Tensor:
        """Cosines and sines of the first `length` positions, table by table."""
        positions_1P, like = torch.arange(length)[None], torch.empty(1)
        pairs = [
            self.parts.rotary(like, positions_1P, *([] if kind is None else [kind]))
            for kind in self._tables
        ]
        return torch.cat([table for pair in pairs for table in pair])

    def _build(self) -> kernels.Decoder:
        p = self.parts
        layers = (kernels.Layer * len(p.layers))(*[self._layer(layer) for layer in p.layers])
        self._alive.append(layers)
        self._windowed = [pair for pair in zip(layers, p.layers, strict=True) if pair[1].window]
        return kernels.Decoder(
            self.base.info.hidden_size, p.layers[0].down.in_features, p.query_heads, p.kv_heads,
            p.head_size, p.head_size, len(p.layers), int(p.gelu), p.norm_epsilon, p.scale,
            layers, self._pointer(p.final_norm), self.output.struct,
        )  # fmt: skip

    def _layer(self, layer: LayerParts) -> kernels.Layer:
        packer, kv_heads = self._packer, self.parts.kv_heads
        heads = {layer.queries: self.parts.query_heads, layer.keys: kv_heads}
        return kernels.Layer(
            packer.joined([layer.queries, layer.keys, layer.values], heads).struct,
            packer.one(layer.out).struct,
            packer.gated(layer.gate, layer.up).struct,
            packer.one(layer.down).struct,
            self._pointer(layer.input_norm),
            self._pointer(layer.after_attention_norm),
            self._pointer(layer.before_mlp_norm),
            self._pointer(layer.after_mlp_norm),
            self._pointer(layer.q_norm),
            self._pointer(layer.k_norm),
            0 if self._tables == [None] else self._tables.index(layer.rotary_type),
            layer.window,
        )

    def _pointer(self, tensor: Tensor | None) -> int:
        self._alive.append(tensor)
        return 0 if tensor is None else tensor.data_ptr()


def _tables(parts: ModelParts) -> list[str | None]:
    """Names of the rotary tables that layers use: one for each layer type, or None for the only."""
    kinds = getattr(parts.rotary, "layer_types", None)
    return [None] if kinds is None else list(kinds)


class _Packer:
    """Packs linear layers, where possible from blocks that expand to the same bits: a GGUF file's,
    or those of weights rounded to int8.
    """

    def __init__(self, base: BaseModel, gguf: GGUFBlocks | None) -> None:
        model = base.model
        self.gguf, self.scales = gguf, base.scales
        self.names = {id(module): name for name, module in model.named_modules()}
        embedding = model.get_input_embeddings()
        output = model.get_output_embeddings()
        if output.weight.data_ptr() == embedding.weight.data_ptr():
            self.names[id(output)] = self.names[id(embedding)]
        self.matrices: list[PackedMatrix] = []

    def one(self, linear: nn.Linear) -> PackedMatrix:
        return self.keep(pack(linear.weight.detach(), linear.bias, self.blocks(linear)))

    def joined(self, linears: list[nn.Linear], heads: dict[nn.Linear, int]) -> PackedMatrix:
        """Several layers that read the same input, as one matrix."""
        weight = torch.cat([linear.weight.detach() for linear in linears])
        parts = alike([self.blocks(linear, heads.get(linear, 1)) for linear in linears])
        whole = None if parts is None else joined_blocks(parts)
        return self.keep(pack(weight, _joined_bias(linears), whole))

    def gated(self, gate: nn.Linear, up: nn.Linear) -> PackedMatrix:
        if gate.bias is not None or up.bias is not None:
            raise Unsupported("a gated MLP with biases")
        weight = interleaved(gate.weight.detach(), up.weight.detach())
        parts = alike([self.blocks(gate), self.blocks(up)])
        whole = None if parts is None else interleaved_blocks(*parts)
        return self.keep(pack(weight, None, whole))

    def blocks(self, linear: nn.Linear, num_heads: int = 1) -> Blocks | None:
        if linear in self.scales:
            return equal_blocks(linear.weight.detach(), self.scales[linear])
        if self.gguf is None:
            return None
        return self.gguf.find(self.names[id(linear)], linear.weight.detach(), num_heads)

    def keep(self, matrix: PackedMatrix) -> PackedMatrix:
        self.matrices.append(matrix)
        return matrix


def _joined_bias(linears: list[nn.Linear]) -> Tensor | None:
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(linear.out_features) if bias is None else bias.detach()
            for linear, bias in zip(linears, biases, strict=True)
        ]
    )


def _packed_bytes(base: BaseModel) -> float:
    """The most bytes that packing takes: rounded weights in their blocks, all others in float32."""
    rounded = sum(layer.weight.numel() for layer in base.scales)
    return 4 * (base.info.num_parameters - rounded) + (1 + 4 / 32) * rounded


def native_decoder(base: BaseModel) -> NativeDecoder:
    """The C++ decoder for `base`. Raises Unsupported, with the reason, where there is none."""
    if base.device.type != "cpu":
        raise Unsupported(f"the model is on {base.device.type}")
    if base.info.quantized:
        raise Unsupported("quantised weights are computed by layers of their own")
    if base.dtype != torch.float32:
        raise Unsupported("the C++ kernels compute in float32 only")
    size = _packed_bytes(base)
    if size > SHARE_OF_MEMORY * free_memory():
        raise Unsupported(f"no room for packed weights (up to {size / 1e9:.1f} GB)")
    console.stage("packing the weights for the C++ kernels")
    return NativeDecoder(base, gguf_source(base.info.name))
