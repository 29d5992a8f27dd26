"""Makes a `PackedModel` from a model's modules or, tensor by tensor, from where they are stored.

Memory is bounded by a few copies of the largest layer; embeddings go in pieces of their rows.

Shapes: O outputs, I inputs.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from medusa_kit.infer.cpu.packed.file import Sink
from medusa_kit.infer.cpu.packed.model import (
    EMBEDDING,
    FINAL_NORM,
    NORMS,
    OUTPUT,
    PackedModel,
    Sizes,
    cosines_and_sines,
)
from medusa_kit.infer.cpu.packed.packing import (
    PLAIN,
    Rows,
    can_join,
    interleaved_rows,
    joined,
    joint_kind,
    kind_of,
    packed_rows,
    packed_shape,
)
from medusa_kit.infer.model_parts import LayerParts, ModelParts, Unsupported
from medusa_kit.store.builds import NotUsable

PIECE = 1 << 24  # numbers of a large matrix in memory at a time
ROWS_TOGETHER = 32  # pieces have multiples of so many rows
CHECKED_POSITIONS = 2048

Pieces = Callable[[], Iterable[Rows]]


class Weights(Protocol):
    """The source of the weights of a model's layers."""

    def whole(self, module: nn.Module, num_heads: int = 1) -> Rows:
        """All rows. `num_heads`: of queries and keys."""

    def pieces(self, module: nn.Module) -> Iterator[Rows]:
        """The rows of an embedding in order, in pieces (`row_pieces`)."""

    def are_tied(self, embedding: nn.Embedding, output: nn.Linear) -> bool:
        """Whether the two have the same numbers."""


def row_pieces(outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """(first, last) rows of the pieces of a matrix."""
    step = max(PIECE // inputs // ROWS_TOGETHER, 1) * ROWS_TOGETHER
    for first in range(0, outputs, step):
        yield first, min(first + step, outputs)


class Packing:
    """Writes the parts of one model to a sink."""

    def __init__(
        self, parts: ModelParts, weights: Weights, sink: Sink,
        advance: Callable[[float], None] = lambda millions: None,
    ) -> None:  # fmt: skip
        """`advance`: called with the millions of weights that have just been packed."""
        self.parts, self.weights, self.sink, self.advance = parts, weights, sink, advance
        self.matrices: dict[str, list[int]] = {}

    @property
    def millions(self) -> float:
        """Millions of weights that `numbers` packs."""
        output, embedding = self.parts.output, self.parts.embedding
        weights = [linear.weight for layer in self.parts.layers for linear in layer.linears]
        weights.append(output.weight)
        if not self.weights.are_tied(embedding, output):
            weights.append(embedding.weight)
        return sum(weight.numel() for weight in weights) / 1e6

    def numbers(self) -> dict[str, Any]:
        """Writes all arrays; returns what belongs to them, but for what describes the whole model.
        Raises Unsupported."""
        parts = self.parts
        tables, scalings = self._rotary()
        factor = embedding_factor(parts.embedding)
        for i, layer in enumerate(parts.layers):
            self._layer(f"layers.{i}.", layer)
        self._vector(FINAL_NORM, parts.final_norm)
        self._embeddings()
        rotary = [tables.index(layer.rotary_type) if len(tables) > 1 else 0
                  for layer in parts.layers]  # fmt: skip
        return {
            "sizes": asdict(
                Sizes(
                    parts.layers[0].down.in_features, parts.query_heads, parts.kv_heads,
                    parts.head_size, parts.gelu, parts.norm_epsilon, parts.scale,
                )
            ),
            "matrices": self.matrices,
            "embedding": EMBEDDING if EMBEDDING in self.matrices else OUTPUT,
            "embedding_factor": factor,
            "layers": [{"window": layer.window, "rotary": table}
                       for layer, table in zip(parts.layers, rotary, strict=True)],
            "rotary_scalings": scalings,
        }  # fmt: skip

    def _layer(self, name: str, layer: LayerParts) -> None:
        heads = {layer.queries: self.parts.query_heads, layer.keys: self.parts.kv_heads}
        if layer.gate.bias is not None or layer.up.bias is not None:
            raise Unsupported("a gated MLP with biases")
        qkv = [layer.queries, layer.keys, layer.values]
        rows = [self.weights.whole(linear, heads.get(linear, 1)) for linear in qkv]
        if not can_join(rows) and can_join(rows[:2]):  # as in llama.cpp's Q4_K_M
            self._matrix(f"{name}values", rows.pop(), qkv.pop().bias)
        self._matrix(f"{name}qkv", joined(rows), _joined_bias(qkv))
        self._matrix(f"{name}out", self.weights.whole(layer.out), layer.out.bias)
        both = interleaved_rows(self.weights.whole(layer.gate), self.weights.whole(layer.up))
        self._matrix(f"{name}gate_up", both, None)
        self._matrix(f"{name}down", self.weights.whole(layer.down), layer.down.bias)
        for norm in NORMS:
            if (weight := getattr(layer, norm)) is not None:
                self._vector(name + norm, weight)

    def _embeddings(self) -> None:
        output, embedding = self.parts.output, self.parts.embedding
        self._layerwise(OUTPUT, output, output.bias)
        if not self.weights.are_tied(embedding, output):
            self._layerwise(EMBEDDING, embedding, None)

    def _matrix(self, name: str, rows: Rows, bias: Tensor | None) -> None:
        outputs, inputs = rows.shape
        self._write(name, kind_of(rows), outputs, inputs, [rows], bias)

    def _layerwise(self, name: str, module: nn.Linear | nn.Embedding, bias: Tensor | None) -> None:
        """Write a matrix piece by piece. Pieces are read twice where there are several: the form
        depends on all of them."""
        outputs, inputs = module.weight.shape
        kinds, kept = [], None
        for kept in self.weights.pieces(module):
            kinds.append(kind_of(kept))
        assert kept is not None
        again = [kept] if len(kinds) == 1 else self.weights.pieces(module)
        self._write(name, joint_kind(kinds), outputs, inputs, again, bias)

    def _write(
        self, name: str, kind: int, outputs: int, inputs: int, pieces: Iterable[Rows],
        bias: Tensor | None,
    ) -> None:  # fmt: skip
        packed = self._packed(kind, pieces)
        dtype = PLAIN.get(kind, torch.uint8)
        self.sink.write(name, dtype, packed_shape(kind, outputs, inputs), packed)
        self.matrices[name] = [kind, outputs, inputs]
        if bias is not None:
            self._vector(f"{name}.bias", bias)

    def _packed(self, kind: int, pieces: Iterable[Rows]) -> Iterator[Tensor]:
        for rows in pieces:
            yield packed_rows(rows, kind)
            self.advance(math.prod(rows.shape) / 1e6)

    def _vector(self, name: str, values: Tensor) -> None:
        self.sink.write(name, torch.float32, values.shape, [values.detach().float()])

    def _rotary(self) -> tuple[list[str | None], list[float]]:
        """Names of the rotary tables that layers use, one for each layer type or None for the only
        one, and their scalings; writes their frequencies."""
        rotary = self.parts.rotary
        kinds = getattr(rotary, "layer_types", None)
        tables: list[str | None] = [None] if kinds is None else list(kinds)
        scalings = []
        for number, kind in enumerate(tables):
            prefix = "" if kind is None else f"{kind}_"
            inverse = getattr(rotary, f"{prefix}inv_freq", None)
            scaling = getattr(rotary, f"{prefix}attention_scaling", None)
            if (
                inverse is None
                or scaling is None
                or not _same_angles(rotary, kind, inverse, scaling)
            ):
                raise Unsupported("its rotary embedding computes something else")
            self._vector(f"rotary.{number}", inverse)
            scalings.append(float(scaling))
        return tables, scalings


def model_of(numbers: dict[str, Any], arrays: dict[str, Tensor]) -> PackedModel:
    """The packed model of these parts. Raises Unsupported for sizes that the kernels do not
    take."""
    try:
        return PackedModel(numbers, arrays)
    except NotUsable as error:
        raise Unsupported(f"its parts have other sizes: {error}") from error


@torch.no_grad()
def embedding_factor(module: nn.Embedding) -> float:
    """The number that the family multiplies a row of the input embedding by."""
    rows = torch.randn(
        8, module.weight.shape[1], dtype=torch.float32, generator=torch.Generator().manual_seed(0)
    )
    rows[0] = 1.0
    probe = copy.copy(module)  # the module itself may be in use, or have no numbers
    probe._parameters = {"weight": nn.Parameter(rows, requires_grad=False)}
    probe.padding_idx = None  # which may lie beyond so few rows
    scaled = probe(torch.arange(len(rows)))
    factor = float(scaled.flatten()[0])
    if not torch.equal(scaled, rows * factor):
        raise Unsupported("its input embedding is of another kind")
    return factor


def _same_angles(rotary: Any, kind: str | None, inverse: Tensor, scaling: float) -> bool:
    """Whether plain arithmetic gives the very bits of the model's own module."""
    positions_1P = torch.arange(CHECKED_POSITIONS)[None]
    model_angles = rotary(
        torch.empty(1, dtype=torch.float32), positions_1P, *([] if kind is None else [kind])
    )
    own_angles = cosines_and_sines(CHECKED_POSITIONS, inverse.float(), float(scaling))
    pairs = zip(own_angles, model_angles, strict=True)
    return all(torch.equal(own, expected) for own, expected in pairs)


def _joined_bias(linears: list[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            torch.zeros(linear.out_features, dtype=torch.float32)
            if linear.bias is None
            else linear.bias.detach()
            for linear in linears
        ]
    )
