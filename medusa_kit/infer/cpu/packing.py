"""Weights as the C++ kernels read them, in the smallest form that expands to the same float32 bits.

A form is a `Kind` of matrix.h: blocks of a GGUF file where the base came from one, bfloat16 where
the weights are bfloat16 numbers (most checkpoints), float32 otherwise.

Shapes: O outputs, I inputs, U panels of 16 outputs, Q groups of inputs, S inputs of a group.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_kit.infer.cpu.kernels import Matrix

LANES = 16
OCTET = 8
GROUPS = (16, 32)
INTEGERS = ("int4", "int8", "int8+", "int8 by 16", "int8+ by 16", "int4", "int8+")
KINDS = ("float32", "bfloat16", *INTEGERS)
F32, BF16, INT4, INT8, INT8_OFFSET, INT8_FINE, INT8_FINE_OFFSET = range(7)
IN_HALVES = {INT4: 7, INT8_OFFSET: 8}  # kind -> the same with 16-bit scales, where that pays
FULL = {half: kind for kind, half in IN_HALVES.items()}
FINE = (INT8_FINE, INT8_FINE_OFFSET)
PLAIN = {F32: torch.float32, BF16: torch.bfloat16}


@dataclass(frozen=True)
class Blocks:
    """w = codes · scales + offsets, group by group: codes_OI int, scales_OQ, offsets_OQ or None."""

    codes_OI: Tensor
    scales_OQ: Tensor
    offsets_OQ: Tensor | None

    @property
    def group(self) -> int:
        return self.codes_OI.shape[1] // self.scales_OQ.shape[1]

    def select(self, rows: Tensor) -> "Blocks":
        offsets = None if self.offsets_OQ is None else self.offsets_OQ[rows]
        return Blocks(self.codes_OI[rows], self.scales_OQ[rows], offsets)

    @property
    def parts(self) -> list[Tensor]:
        return [self.scales_OQ, *([] if self.offsets_OQ is None else [self.offsets_OQ])]

    @property
    def kind(self) -> int:
        kind = self._codes_kind
        halves = all(torch.equal(part.half().float(), part.float()) for part in self.parts)
        return IN_HALVES.get(kind, kind) if halves else kind

    @property
    def _codes_kind(self) -> int:
        low, high = int(self.codes_OI.min()), int(self.codes_OI.max())
        if self.group == 32 and low >= 0 and high < 16 and self.offsets_OQ is not None:
            return INT4
        fine = 0 if self.group == 32 else INT8_FINE - INT8
        return (INT8 if self.offsets_OQ is None else INT8_OFFSET) + fine

    def expand(self) -> Tensor:
        """weights_OI in float32, by the arithmetic of the kernels."""
        shape = self.codes_OI.shape
        codes = self.codes_OI.view(shape[0], -1, self.group).float()
        weights = codes * self.scales_OQ[..., None]  # exact: at most 24 bits
        if self.offsets_OQ is not None:
            weights = weights + self.offsets_OQ[..., None]
        return weights.view(shape)


Rows = Blocks | Tensor  # of a weight: float32 numbers, or blocks that expand to them


@dataclass(frozen=True)
class PackedMatrix:
    """A packed weight, kept alive for the pointer in `struct`."""

    struct: Matrix
    data: Tensor
    bias: Tensor | None

    @classmethod
    def of(
        cls, kind: int, outputs: int, inputs: int, data: Tensor, bias: Tensor | None
    ) -> "PackedMatrix":
        pointer = 0 if bias is None else bias.data_ptr()
        return cls(Matrix(kind, outputs, inputs, data.data_ptr(), pointer), data, bias)

    @property
    def kind(self) -> str:
        return KINDS[self.struct.kind]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def pack(
    weight_OI: Tensor, bias_O: Tensor | None = None, blocks: Blocks | None = None
) -> PackedMatrix:
    """Pack float32 weights; `blocks`, where given, must expand to them (`expand`)."""
    rows = weight_OI if blocks is None else blocks
    kind = kind_of(rows)  # read once: it looks at every code and scale
    bias = None if bias_O is None else bias_O.detach().float().contiguous()
    outputs, inputs = weight_OI.shape
    return PackedMatrix.of(kind, outputs, inputs, packed_rows(rows, kind), bias)


def kind_of(rows: Rows) -> int:
    """The smallest form that these rows can take."""
    if isinstance(rows, Blocks):
        return rows.kind
    return BF16 if torch.equal(rows.bfloat16().float(), rows) else F32


def joint_kind(kinds: Collection[int]) -> int:
    """The smallest form of a matrix whose pieces could take these."""
    plain = [kind for kind in kinds if kind in PLAIN]
    if plain:
        return BF16 if set(kinds) == {BF16} else F32
    full = {FULL.get(kind, kind) for kind in kinds}
    kind = full.pop() if len(full) == 1 else INT8_OFFSET  # which holds what INT4 does
    return IN_HALVES[kind] if all(kind in FULL for kind in kinds) else kind


def packed_rows(rows: Rows, kind: int) -> Tensor:
    """Rows as the kernels read them. 32 must divide the number of all but a matrix's last rows."""
    if isinstance(rows, Blocks) and kind not in PLAIN:
        return _pack_blocks(rows, kind)
    return _pack_plain(expanded(rows).to(PLAIN[kind]))


def packed_shape(kind: int, outputs: int, inputs: int) -> tuple[int, ...]:
    """The shape of a packed matrix: of numbers for plain kinds, else of bytes."""
    panels = -(-outputs // (2 * LANES)) * 2
    if kind in PLAIN:
        return (panels, -(-inputs // OCTET) * OCTET, LANES)
    group = group_of(kind)
    code_bytes = LANES * group // (2 if FULL.get(kind, kind) == INT4 else 1)
    return (panels, inputs // group, header_bytes(kind) + code_bytes)


def group_of(kind: int) -> int:
    return 16 if kind in FINE else 32


def header_bytes(kind: int) -> int:
    """Bytes of the scales and offsets of a group of inputs of a panel."""
    numbers = 1 if kind in (INT8, INT8_FINE) else 2
    return LANES * numbers * (2 if kind in FULL else 4)


def expanded(rows: Rows) -> Tensor:
    return rows.expand() if isinstance(rows, Blocks) else rows


def joined(parts: Sequence[Rows]) -> Rows:
    """Several weights that read the same input, as one."""
    if (blocks := alike(parts)) is not None:
        return joined_blocks(blocks)
    return torch.cat([expanded(part) for part in parts])


def interleaved_rows(first: Rows, second: Rows) -> Rows:
    if (blocks := alike([first, second])) is not None:
        return interleaved_blocks(*blocks)
    return interleaved(expanded(first), expanded(second))


def interleaved(first_OI: Tensor, second_OI: Tensor) -> Tensor:
    """Panels of two matrices alternating, as the gated MLP's phase reads them."""
    return torch.cat([_by_panel(first_OI), _by_panel(second_OI)], dim=1).flatten(0, 1)


def interleaved_blocks(first: Blocks, second: Blocks) -> Blocks:
    both_offsets = None
    if first.offsets_OQ is not None and second.offsets_OQ is not None:
        both_offsets = interleaved(first.offsets_OQ, second.offsets_OQ)
    return Blocks(
        interleaved(first.codes_OI, second.codes_OI),
        interleaved(first.scales_OQ, second.scales_OQ),
        both_offsets,
    )


def joined_blocks(parts: list[Blocks]) -> Blocks:
    offsets = [part.offsets_OQ for part in parts if part.offsets_OQ is not None]
    return Blocks(
        torch.cat([part.codes_OI for part in parts]),
        torch.cat([part.scales_OQ for part in parts]),
        torch.cat(offsets) if offsets else None,
    )


def alike(parts: Sequence[Rows]) -> list[Blocks] | None:
    """The parts, if all are blocks and can be stored in one matrix; else None."""
    whole = [part for part in parts if isinstance(part, Blocks)]
    shapes = {(part.group, part.offsets_OQ is None) for part in whole}
    return whole if len(whole) == len(parts) and len(shapes) == 1 else None


def _by_panel(x_OI: Tensor) -> Tensor:
    """[U, 16, I], padded with zeros."""
    return F.pad(x_OI, (0, 0, 0, -x_OI.shape[0] % LANES)).view(-1, LANES, x_OI.shape[1])


def even_panels(x_OI: Tensor) -> Tensor:
    """[U, 16, I], U even."""
    return F.pad(x_OI, (0, 0, 0, -x_OI.shape[0] % (2 * LANES))).view(-1, LANES, x_OI.shape[1])


def _pack_plain(weight_OI: Tensor) -> Tensor:
    padded = F.pad(weight_OI, (0, -weight_OI.shape[1] % OCTET))
    return even_panels(padded).transpose(1, 2).contiguous()


def _pack_blocks(blocks: Blocks, kind: int) -> Tensor:
    """[U, Q, bytes]: scales, offsets, codes of a group, lane by lane."""
    codes_UQSL = even_panels(blocks.codes_OI).unflatten(2, (-1, blocks.group)).permute(0, 2, 3, 1)
    if kind in (INT4, IN_HALVES[INT4]):
        octets = codes_UQSL.unflatten(2, (-1, OCTET))  # [U, Q, S / 8, 8, 16]
        words = torch.zeros(octets.shape[:3] + octets.shape[4:], dtype=torch.int32)
        for place in range(OCTET):
            words |= octets[:, :, :, place].to(torch.int32) << 4 * place
        code_bytes = words.view(torch.uint8).flatten(2)
    else:  # for each octet: a lane's even inputs in four bytes, then its odd ones
        octets = codes_UQSL.to(torch.int8).unflatten(2, (-1, OCTET // 2, 2))
        code_bytes = octets.permute(0, 1, 2, 4, 5, 3).contiguous().view(torch.uint8).flatten(2)
    number = torch.float16 if kind in IN_HALVES.values() else torch.float32
    headers = [
        even_panels(part.to(number)).transpose(1, 2).contiguous().view(torch.uint8)
        for part in blocks.parts
    ]
    return torch.cat([*headers, code_bytes], dim=2).contiguous()
