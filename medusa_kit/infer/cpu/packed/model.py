"""All that the C++ steps need of a model: packed matrices, norms and numbers, without its modules.

It lies in a file that is mapped (`file`), or in memory where there is no place for one.
`packing_up` makes it.

Shapes: D hidden, V vocabulary, E size of an embedding, X and N and R token ids, T rotary tables,
P positions, S rotary size; of a matrix R rows, I inputs, U panels of 16 outputs, L their lanes,
Q groups of inputs, W words of a group.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.file import mapped
from medusa_kit.infer.cpu.packed.packing import (
    LANES,
    PLAIN,
    PackedMatrix,
    even_panels,
    fields,
    packed_shape,
)
from medusa_kit.store.builds import NotUsable

OUTPUT, EMBEDDING, FINAL_NORM = "output", "embedding", "final_norm"
MATRICES = ("qkv", "out", "gate_up", "down", "values")
OPTIONAL = "values"  # where they are stored in another form; else a part of qkv
NORMS = (
    "input_norm", "after_attention_norm", "before_mlp_norm", "after_mlp_norm", "q_norm", "k_norm",
)  # fmt: skip
DESCRIBED = (  # fields of BaseModelInfo
    "model_type", "hidden_size", "vocab_size", "num_layers", "context_length", "tied_embeddings",
    "num_parameters", "fingerprint", "weights",
)  # fmt: skip
NEEDED_NORMS = ("input_norm", "before_mlp_norm")


@dataclass(frozen=True)
class Sizes:
    """The numbers that the kernels need beside the weights."""

    mlp: int
    query_heads: int
    kv_heads: int
    head_size: int
    gelu: bool
    norm_epsilon: float
    scale: float  # of attention's scores


class PackedModel:
    """`info`: what describes the weights, fields of BaseModelInfo. `windows`: positions
    in sight of each layer, 0 for all; a check may narrow them for a while."""

    def __init__(self, numbers: dict[str, Any], arrays: dict[str, Tensor]) -> None:
        """Raises NotUsable where something is missing or of a wrong size."""
        try:
            self._read(numbers, arrays)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise NotUsable(f"a part of it is missing or wrong: {error!r}") from error

    def _read(self, numbers: dict[str, Any], arrays: dict[str, Tensor]) -> None:
        self.info: dict[str, Any] = dict(numbers["info"])
        self.sizes = Sizes(**numbers["sizes"])
        self.rounded: dict[str, Any] | None = numbers["rounded"]
        self.matrices = {
            name: matrix_in(arrays, name, *entry) for name, entry in numbers["matrices"].items()
        }
        self.output = self.matrices[OUTPUT]
        self.input = self.matrices[numbers["embedding"]]
        self.embedding_factor = float(numbers["embedding_factor"])
        layers = numbers["layers"]
        self.windows = [int(layer["window"]) for layer in layers]
        self.rotary_of_layer = [int(layer["rotary"]) for layer in layers]
        self.layers = [
            {
                part: self.matrices[f"layers.{i}.{part}"]
                for part in MATRICES
                if part != OPTIONAL or f"layers.{i}.{part}" in self.matrices
            }
            for i in range(len(layers))
        ]
        self.norms = [
            {name: arrays.get(f"layers.{i}.{name}") for name in NORMS} for i in range(len(layers))
        ]
        self.final_norm = arrays[FINAL_NORM]
        scalings = numbers["rotary_scalings"]
        self._rotary = [(arrays[f"rotary.{t}"], float(s)) for t, s in enumerate(scalings)]
        self._check()

    def _check(self) -> None:
        info, hidden, sizes = self.info, self.info["hidden_size"], self.sizes
        queries, keys = (n * sizes.head_size for n in (sizes.query_heads, sizes.kv_heads))
        shapes = {"qkv": (queries + 2 * keys, hidden), "out": (hidden, queries),
                  "down": (hidden, sizes.mlp)}  # fmt: skip
        expected = {OUTPUT: (info["vocab_size"], hidden)}
        for i in range(len(self.layers)):
            expected |= {f"layers.{i}.{part}": shape for part, shape in shapes.items()}
            if OPTIONAL in self.layers[i]:
                expected[f"layers.{i}.qkv"] = (queries + keys, hidden)
                expected[f"layers.{i}.{OPTIONAL}"] = (keys, hidden)
        for name, shape in expected.items():
            struct = self.matrices[name].struct
            if (struct.outputs, struct.inputs) != shape:
                raise ValueError(f"{name} is {struct.outputs} x {struct.inputs}, expected {shape}")
        lengths = [
            (self.final_norm, hidden),
            *((inv, sizes.head_size // 2) for inv, _ in self._rotary),
        ]
        for norms in self.norms:
            if any(norms[name] is None for name in NEEDED_NORMS):
                raise ValueError("a layer lacks a norm")
            lengths += [(norm, sizes.head_size if name in ("q_norm", "k_norm") else hidden)
                        for name, norm in norms.items() if norm is not None]  # fmt: skip
        if any(vector.shape != (length,) for vector, length in lengths):
            raise ValueError("a norm or rotary table of a wrong size")
        if not set(self.rotary_of_layer) <= set(range(len(self._rotary))):
            raise ValueError("a layer names a rotary table that is not there")

    @property
    def embedding_size(self) -> int:
        return int(self.input.struct.inputs)

    @property
    def step_matrices(self) -> list[PackedMatrix]:
        """The matrices that a step reads whole."""
        return [self.output, *(matrix for layer in self.layers for matrix in layer.values())]

    def input_rows(self, ids_X: Tensor) -> Tensor:
        """Rows of the input embedding as the checkpoint has them, [X, E]."""
        rows = expanded_rows(self.input, ids_X.flatten())
        return rows.view(*ids_X.shape, self.embedding_size)

    def embeddings(self, ids_N: Tensor) -> Tensor:
        """Rows of the input embedding as the first layer reads them, [N, E]: some families scale
        them."""
        return expanded_rows(self.input, ids_N, self.embedding_factor)

    def output_rows(self, ids_R: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(weight_RD, bias_R or None) of the output embedding; all rows, made anew, for None."""
        bias = self.output.bias
        chosen = bias if bias is None or ids_R is None else bias[ids_R]
        return expanded_rows(self.output, ids_R), chosen

    def rotary_up_to(self, length: int) -> Tensor:
        """Cosines and sines of the first `length` positions, [2T, P, S], table by table."""
        return torch.cat(
            [part for table in self._rotary for part in cosines_and_sines(length, *table)]
        )


def cosines_and_sines(length: int, inverse_S: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Each [1, P, S], by the arithmetic of the families' rotary embeddings. `inverse_S`: half of
    the frequencies, since the other half is the same."""
    angles_1PS = torch.arange(length)[None, :, None].float() * inverse_S
    twice_1PS = torch.cat((angles_1PS, angles_1PS), dim=-1)
    return twice_1PS.cos() * scaling, twice_1PS.sin() * scaling


def opened(path: Path) -> PackedModel:
    """The model in a file. Raises NotUsable, OSError."""
    return PackedModel(*mapped(path))


def matrix_in(
    arrays: dict[str, Tensor], name: str, kind: int, outputs: int, inputs: int
) -> PackedMatrix:
    """A matrix among arrays. Raises KeyError, ValueError where it is missing or of a wrong size."""
    data, bias = arrays[name], arrays.get(f"{name}.bias")
    dtype = PLAIN.get(kind, torch.uint8)
    if data.dtype != dtype or data.shape != packed_shape(kind, outputs, inputs):
        raise ValueError(f"{name} is {data.dtype} {tuple(data.shape)}")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != torch.float32):
        raise ValueError(f"the bias of {name} is {bias.dtype} {tuple(bias.shape)}")
    return PackedMatrix.of(kind, outputs, inputs, data, bias)


def expanded_rows(matrix: PackedMatrix, ids_R: Tensor | None, factor: float = 1.0) -> Tensor:
    """Rows of the weight times a factor, [R, I] in float32; all of them for None.

    Raises IndexError for what is not a row.
    """
    library = kernels.load_library()
    assert library is not None
    outputs, inputs = int(matrix.struct.outputs), int(matrix.struct.inputs)
    ids_R = torch.arange(outputs) if ids_R is None else ids_R.contiguous()
    rows_RI, count = torch.empty(len(ids_R), inputs, dtype=torch.float32), len(ids_R)
    done = library.mk_rows(
        ctypes.byref(matrix.struct), ids_R.data_ptr(), count, factor, rows_RI.data_ptr()
    )
    if done < count:
        raise IndexError(f"row {int(ids_R[done])} of a matrix that has {outputs}")
    return rows_RI


def chosen_rows(matrix: PackedMatrix, ids_R: Tensor) -> PackedMatrix:
    """A packed matrix of these rows, in the same form."""
    kind = int(matrix.struct.kind)
    bias_R = None if matrix.bias is None else matrix.bias[ids_R]
    data = _chosen_numbers(matrix.data, ids_R) if kind in PLAIN else _chosen(matrix, ids_R)
    return PackedMatrix.of(kind, len(ids_R), int(matrix.struct.inputs), data, bias_R)


def _chosen_numbers(data_UIL: Tensor, ids_R: Tensor) -> Tensor:
    rows_RI = data_UIL[ids_R // LANES, :, ids_R % LANES]
    return even_panels(rows_RI).transpose(1, 2).contiguous()


def _chosen(matrix: PackedMatrix, ids_R: Tensor) -> Tensor:
    parts, first = [], 0
    for field in fields(int(matrix.struct.kind)):
        stored_UQB = matrix.data[..., first : first + field.num_bytes].contiguous()
        words_UQWL = stored_UQB.view(field.dtype).unflatten(2, (-1, LANES))
        rows_RQW = words_UQWL[ids_R // LANES, :, :, ids_R % LANES]
        panels_ULQW = even_panels(rows_RQW.flatten(1)).unflatten(2, rows_RQW.shape[1:])
        parts.append(panels_ULQW.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2))
        first += field.num_bytes
    return torch.cat(parts, dim=2)
