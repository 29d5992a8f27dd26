"""A base model's verify step in one C++ call, for families that `describe` knows, on a CPU.

Prompts are trees without branches, so they run here too, in pieces. The model itself is unchanged
and can take over any forward, since both write the same cache.

Shapes: N nodes with root, M of them kept, D hidden, L watched layers, V vocabulary, E head
dim, T rotary tables, P positions, R likeliest tokens.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from ctypes import addressof
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit import console
from medusa_kit.base.files import gguf_source
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.describe import describe
from medusa_kit.infer.cpu.packed.file import MemorySink
from medusa_kit.infer.cpu.packed.gguf_blocks import GGUFBlocks, equal_blocks
from medusa_kit.infer.cpu.packed.model import DESCRIBED, MATRICES, NORMS, PackedModel
from medusa_kit.infer.cpu.packed.packing import Blocks, PackedMatrix, Rows
from medusa_kit.infer.cpu.packed.packing_up import Packing, model_of, row_pieces
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.mkl_linear import SHARE_OF_KERNELS, free_memory
from medusa_kit.infer.model_parts import ModelParts, Unsupported
from medusa_kit.infer.own_rounding import FAILURES
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.locks import lock_of
from medusa_kit.settings.engine import FLOAT32, INT8, INT16
from medusa_kit.tree.shape import Numbers

RANKED = 8  # likeliest tokens returned for each node: a by-product of finding the argmax
NO_KERNELS = "the C++ kernels are not available"
DIGITS = {FLOAT32: 3, INT16: 2, INT8: 1}  # of 8 bits that a number is cut into, see integers.h


class NativeDecoder:
    """Runs up to MAX_ROWS nodes at once. `scale_logits`: what the family does to its logits."""

    def __init__(
        self,
        packed: PackedModel,
        scale_logits: Callable[[Tensor], Tensor],
        windows: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """`windows`: those of the layers as they are now; by default the packed model's.
        Raises Unsupported where there are no kernels."""
        loaded = kernels.load_library()
        if loaded is None:
            raise Unsupported(NO_KERNELS)
        self._library = loaded
        self.packed = packed
        self._scale_logits = scale_logits
        self._windows = windows or (lambda: packed.windows)
        self.activations = FLOAT32
        self._rotary_2TPE = torch.empty(0, 0, dtype=torch.float32)
        self._cache_shape = (packed.sizes.kv_heads, packed.sizes.head_size)
        self._struct = self._build()
        sizes = [matrix.struct for matrix in packed.step_matrices]
        self._num_weights = sum(struct.outputs * struct.inputs for struct in sizes)

    def with_activations(self, activations: str) -> "NativeDecoder":
        """A decoder of the same weights that multiplies quantised ones by numbers of this
        precision. Raises Unsupported where there are none."""
        if activations == self.activations:
            return self
        if not kernels.has_integers(self._library):
            raise Unsupported(f"{self._library.mk_isa().decode()} does not multiply integers")
        if not any(matrix.in_integers for matrix in self.packed.step_matrices):
            raise Unsupported("no weights of this model are stored in 4 to 8 bits")
        decoder = copy(self)
        decoder.activations = activations
        decoder._struct = decoder._build()
        return decoder

    @property
    def output(self) -> PackedMatrix:
        return self.packed.output

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return sum(matrix.num_bytes for matrix in self.packed.step_matrices)

    @property
    def summary(self) -> str:
        """Instruction set and how the weights are stored, for reports."""
        forms = sorted({matrix.kind for matrix in self.packed.step_matrices})
        size = f"{self.weight_bytes / 1e6:,.0f} MB of weights as {', '.join(forms)}"
        activations = "" if self.activations == FLOAT32 else f"{self.activations} activations, "
        return f"{self._library.mk_isa().decode()}, {activations}{size}"

    def takes(self, cache: TreeCache, num_nodes: int) -> bool:
        """Whether rows of at most so many nodes can run in C++: few, and a cache of one shape."""
        few = num_nodes <= kernels.MAX_ROWS
        return few and cache.block_of(*self._cache_shape) is not None

    def prompt_chunk(self, num_rows: int) -> int:
        """How many tokens of each of `num_rows` prompts a call takes, or two calls for too many
        prompts."""
        return max(kernels.MAX_ROWS // num_rows, 1)

    def score(
        self,
        cache: TreeCache,
        nodes: Forest,
        positions_N: Numbers,
        rows: Sequence[int],
        keep_M: Tensor | None = None,
        watched: "Watched | None" = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden_MD, logits_MV, ranked_MR) of the nodes `keep_M` (all) of trees after these rows
        of the cache. Several threads may call; the kernels take turns. A node's bits are the same
        in a step's tree as in a piece of a prompt. `watched`: gets outputs of layers.
        """
        M = len(nodes.tokens_N) if keep_M is None else len(keep_M)
        vocab_size = self.packed.info["vocab_size"]
        logits_MV = torch.empty(M, vocab_size, dtype=torch.float32)
        ranked_MR = torch.empty(M, min(RANKED, vocab_size), dtype=torch.int64)
        hidden_MD = self._run(
            cache, nodes, positions_N, rows, keep_M, logits_MV, ranked_MR, watched
        )
        return hidden_MD, self._scale_logits(logits_MV), ranked_MR

    def hidden_states(
        self, cache: TreeCache, nodes: Forest, positions_N: Numbers, rows: Sequence[int]
    ) -> Tensor:
        """hidden_ND of all nodes, the same bits; no time is spent on logits."""
        return self._run(cache, nodes, positions_N, rows)

    def _run(
        self,
        cache: TreeCache,
        nodes: Forest,
        positions_N: Numbers,
        rows: Sequence[int],
        keep_M: Tensor | None = None,
        logits_MV: Tensor | None = None,
        ranked_MR: Tensor | None = None,
        watched: "Watched | None" = None,
    ) -> Tensor:
        """hidden_MD; logits, ranks and outputs of layers are written where there is room."""
        keep_M = _first(len(nodes.tokens_N)) if keep_M is None else keep_M
        M, D = len(keep_M), self.packed.info["hidden_size"]
        embeddings_ND = self.packed.embeddings(nodes.tokens_N)
        rotary_2TPE = self._rotary(int(positions_N.max()))
        hidden_MD = torch.empty(M, D, dtype=torch.float32)
        # Arrays of ctypes: after a step an operation of torch takes as long as a tenth of a layer.
        starts = _integers(0, *accumulate(nodes.counts))
        rows_B = _integers(*rows)
        lengths_B = _integers(*(cache.lengths[row] for row in rows))
        depths_N, sees = nodes.depths_N, nodes.sees
        block = cache.block_of(*self._cache_shape)
        assert block is not None
        cache.reach(rows, nodes.counts)
        if self._windowed:
            windows = self._windows()
            for i in self._windowed:
                self._layers[i].window = windows[i]
        struct = kernels.Step(
            len(rows), len(nodes.tokens_N), len(cache.lengths), cache.num_positions,
            embeddings_ND.data_ptr(), rotary_2TPE.data_ptr(), rotary_2TPE.shape[1],
            positions_N.ctypes.data, addressof(starts), addressof(rows_B), addressof(lengths_B),
            depths_N.ctypes.data, sees.ctypes.data, block.data_ptr(),
            M, keep_M.data_ptr(), hidden_MD.data_ptr(), _pointer(logits_MV),
            0 if ranked_MR is None else ranked_MR.shape[1], _pointer(ranked_MR),
            block.dtype == torch.float16,
            *(() if watched is None else watched.room_for(len(nodes.tokens_N), D)),
        )  # fmt: skip
        threads = kernels.threads_for(len(nodes.tokens_N) * self._num_weights)
        self._library.mk_step(ctypes.byref(self._struct), ctypes.byref(struct), threads)
        return hidden_MD

    def _rotary(self, last: int) -> Tensor:
        """Cosines and sines of all positions up to this, from the model's own rotary embedding."""
        rotary_2TPE = self._rotary_2TPE
        if last >= rotary_2TPE.shape[1]:
            rotary_2TPE = self._rotary_2TPE = self.packed.rotary_up_to(max(2 * last, 256))
        return rotary_2TPE

    def _build(self) -> kernels.Decoder:
        packed, sizes = self.packed, self.packed.sizes
        layers = [self._layer(i) for i in range(len(packed.layers))]
        self._layers = (kernels.Layer * len(layers))(*layers)
        self._windowed = [i for i, window in enumerate(packed.windows) if window]
        return kernels.Decoder(
            packed.info["hidden_size"], sizes.mlp, sizes.query_heads, sizes.kv_heads,
            sizes.head_size, sizes.head_size, len(layers), int(sizes.gelu), sizes.norm_epsilon,
            sizes.scale, self._layers, packed.final_norm.data_ptr(), self._form(packed.output),
        )  # fmt: skip

    def _layer(self, number: int) -> kernels.Layer:
        packed = self.packed
        matrices, norms = packed.layers[number], packed.norms[number]
        pointers = [0 if (norm := norms[name]) is None else norm.data_ptr() for name in NORMS]
        none = kernels.Matrix()
        return kernels.Layer(
            *(self._form(matrices[name]) if name in matrices else none for name in MATRICES),
            *pointers,
            packed.rotary_of_layer[number], packed.windows[number],
        )  # fmt: skip

    def _form(self, matrix: PackedMatrix) -> kernels.Matrix:
        return kernels.with_digits(matrix.struct, DIGITS[self.activations])


class Watched:
    """Room for the outputs of some layers at all nodes of one call: `outputs_NLD`."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = _integers(*layers)
        self.outputs_NLD = torch.empty(0, len(layers), 0, dtype=torch.float32)

    def room_for(self, num_nodes: int, hidden_size: int) -> tuple[int, int, int]:
        """The last fields of `kernels.Step`."""
        self.outputs_NLD = torch.empty(
            num_nodes, len(self._layers), hidden_size, dtype=torch.float32
        )
        return len(self._layers), addressof(self._layers), self.outputs_NLD.data_ptr()


def _integers(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


@lru_cache(maxsize=kernels.MAX_ROWS)
def _first(count: int) -> Tensor:
    """The numbers below `count`; never written to."""
    return torch.arange(count)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _ModuleWeights:
    """Weights of modules in memory, where possible as blocks that expand to the same bits: a GGUF
    file's, or those of weights rounded to int8.
    """

    def __init__(self, base: BaseModel, gguf: GGUFBlocks | None) -> None:
        model = base.own_model
        self._gguf, self._scales = gguf, base.scales
        self._names = {id(module): name for name, module in model.named_modules()}
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        if self.are_tied(embedding, output):
            self._names[id(output)] = self._names[id(embedding)]

    def whole(self, module: Any, num_heads: int = 1) -> Rows:
        return self._rows(module, 0, len(module.weight), num_heads)

    def pieces(self, module: Any) -> Iterator[Rows]:
        for first, last in row_pieces(*module.weight.shape):
            yield self._rows(module, first, last)

    def are_tied(self, embedding: nn.Embedding, output: nn.Linear) -> bool:
        return embedding.weight.data_ptr() == output.weight.data_ptr()

    def _rows(self, module: Any, first: int, last: int, num_heads: int = 1) -> Rows:
        weight_OI = module.weight.detach()[first:last]
        blocks: Blocks | None = None
        if module in self._scales:
            blocks = equal_blocks(weight_OI, self._scales[module][first:last])
        elif self._gguf is not None:
            blocks = self._gguf.find(self._names[id(module)], weight_OI, num_heads, first)
        return weight_OI if blocks is None else blocks


def packed_in_memory(base: BaseModel, parts: ModelParts, gguf: Path | None = None) -> PackedModel:
    """The packed weights of a model whose modules are in memory. Raises Unsupported."""
    sink, info = MemorySink(), base.info
    weights = _ModuleWeights(base, GGUFBlocks(gguf) if gguf else None)
    described = {name: getattr(info, name) for name in DESCRIBED}
    numbers = Packing(parts, weights, sink).numbers()
    return model_of({**numbers, "info": described, "rounded": None}, sink.arrays)


def _packed_bytes(base: BaseModel) -> float:
    """The most bytes that packing takes: rounded weights in their blocks, all others in float32."""
    rounded = sum(layer.weight.numel() for layer in base.scales)
    return 4 * (base.info.num_parameters - rounded) + (1 + 4 / 32) * rounded


DECODER = "_native_decoder"  # attribute of a base: the changes it includes, and a reference to it


def native_decoder(base: BaseModel) -> NativeDecoder:
    """The C++ decoder for `base` as it is now, one for all who ask meanwhile. Raises Unsupported,
    with the reason, where there is none."""
    with lock_of(base):
        base.changes()
        number, kept = vars(base).get(DECODER, (None, lambda: None))
        decoder: NativeDecoder | None = kept() if number == base.number else None
        if decoder is None:
            decoder = _packed_decoder(base)
            setattr(base, DECODER, (base.number, weakref.ref(decoder)))
        return decoder


def _packed_decoder(base: BaseModel) -> NativeDecoder:
    if base.device.type != "cpu":
        raise Unsupported(f"the model is on {base.device.type}")
    if base.info.quantized:
        raise Unsupported("quantised weights are computed by layers of their own")
    if base.dtype != torch.float32:
        raise Unsupported("the C++ kernels compute in float32 only")
    size = _packed_bytes(base)
    if size > SHARE_OF_KERNELS * free_memory():
        raise Unsupported(f"no room for packed weights (up to {size / 1e9:.1f} GB)")
    if kernels.load_library() is None:
        raise Unsupported(NO_KERNELS)
    console.stage("packing the weights for the C++ kernels")
    try:
        parts = describe(base.own_model)
        packed = packed_in_memory(base, parts, gguf_source(base.info.name))
    except FAILURES as error:  # its modules are not what those of its family are
        raise Unsupported(f"its modules cannot be read: {error}") from error
    return NativeDecoder(packed, base.scale_logits, lambda: [p.window for p in parts.layers])
