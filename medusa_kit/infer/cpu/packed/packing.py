"""Weights as the C++ kernels read them, in the smallest form that expands to the same float32 bits.

A form is a `Kind` of matrix.h: blocks of a GGUF file where the base came from one, bfloat16 where
the weights are bfloat16 numbers (most checkpoints), float32 otherwise.

Shapes: O outputs, I inputs, U panels of 16 outputs, Q groups of inputs, S inputs of a group.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_kit.infer.cpu.binding.kernels import Matrix
from medusa_kit.infer.cpu.packed.stored_rows import StoredRows, like_rows

LANES = 16
OCTET = 8
GROUPS = (16, 32)
INTEGERS = (
    "int4", "int8", "int8+", "int8 by 16", "int8+ by 16", "int4", "int8+",
    "int4 by 256", "int6 by 256",
)  # fmt: skip
KINDS = ("float32", "bfloat16", *INTEGERS)
F32, BF16, INT4, INT8, INT8_OFFSET, INT8_FINE, INT8_FINE_OFFSET = range(7)
IN_HALVES = {INT4: 7, INT8_OFFSET: 8}  # kind -> the same with 16-bit scales, where that pays
FULL = {half: kind for kind, half in IN_HALVES.items()}
SUPER_BLOCKS = INT4_SUPER, INT6_SUPER = 9, 10  # 256 inputs of an output share 16-bit factors
SUPER = 256
AS_PLAIN_BLOCKS = {INT4_SUPER: INT4, INT6_SUPER: INT8_FINE}
FINE = (INT8_FINE, INT8_FINE_OFFSET, INT6_SUPER)
WITHOUT_OFFSETS = (INT8, INT8_FINE, INT6_SUPER)
FOUR_BITS = (INT4, IN_HALVES[INT4], INT4_SUPER)
PLAIN = {F32: torch.float32, BF16: torch.bfloat16}
OF_STORED = {
    "Q4_0": INT4, "Q4_1": INT4, "Q5_0": INT8, "Q5_1": INT8_OFFSET, "Q8_0": INT8,
    "Q4_K": INT4_SUPER, "Q5_K": INT8_OFFSET, "Q6_K": INT6_SUPER,
}  # fmt: skip


@dataclass(frozen=True)
class Blocks:
    """w = codes · scales + offsets, group by group: codes_OI int, scales_OQ, offsets_OQ or None.

    `factors`: where scales (and offsets) are whole numbers of at most 8 bits times these, which 256
    inputs share: [O, I / 256] each, of the scales and of the offsets.
    """

    codes_OI: Tensor
    scales_OQ: Tensor
    offsets_OQ: Tensor | None
    factors: tuple[Tensor, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.codes_OI.shape
        return outputs, inputs

    @property
    def group(self) -> int:
        return self.codes_OI.shape[1] // self.scales_OQ.shape[1]

    def select(self, rows: Tensor) -> "Blocks":
        return like(lambda x: x[0][rows], [self])

    @property
    def parts(self) -> list[Tensor]:
        return [self.scales_OQ, *([] if self.offsets_OQ is None else [self.offsets_OQ])]

    @property
    def kind(self) -> int:
        kind = self._codes_kind
        if self.factors and (kind_of_super := self._super_kind(kind)) is not None:
            return kind_of_super
        halves = all(torch.equal(part.half().float(), part.float()) for part in self.parts)
        return IN_HALVES.get(kind, kind) if halves else kind

    @property
    def _codes_kind(self) -> int:
        low, high = int(self.codes_OI.min()), int(self.codes_OI.max())
        if self.group == 32 and low >= 0 and high < 16 and self.offsets_OQ is not None:
            return INT4
        fine = 0 if self.group == 32 else INT8_FINE - INT8
        return (INT8 if self.offsets_OQ is None else INT8_OFFSET) + fine

    def _super_kind(self, kind: int) -> int | None:
        """The form of shared factors that holds these, of codes that could be of `kind`."""
        if kind == INT4:
            return INT4_SUPER
        low, high = int(self.codes_OI.min()), int(self.codes_OI.max())
        return INT6_SUPER if kind == INT8_FINE and low >= -32 and high < 32 else None

    def bytes_of_scales(self) -> list[Tensor]:
        """Scales and offsets as multiples of the factors, whole numbers [O, Q]."""
        multiples = []
        for part_OQ, factor_OS in zip(self.parts, self.factors, strict=True):
            part_OSG = part_OQ.unflatten(1, (factor_OS.shape[1], -1))
            divisor_OS1 = torch.where(factor_OS == 0, 1.0, factor_OS)[..., None]
            multiples.append((part_OSG / divisor_OS1).round_().to(torch.int16).flatten(1))
        return multiples

    def expand(self) -> Tensor:
        """weights_OI in float32, by the arithmetic of the kernels."""
        shape = self.codes_OI.shape
        codes = self.codes_OI.view(shape[0], -1, self.group).float()
        weights = codes * self.scales_OQ[..., None]  # exact: at most 24 bits
        if self.offsets_OQ is not None:
            weights = weights + self.offsets_OQ[..., None]
        return weights.view(shape)


# Of a weight: float32 numbers, blocks that expand to them, or such blocks as a file has them.
Rows = Blocks | Tensor | StoredRows


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
    def in_integers(self) -> bool:
        """Whether the weights are codes of 4 to 8 bits, not floats."""
        return self.struct.kind not in PLAIN

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
    if isinstance(rows, StoredRows):
        kind = OF_STORED[rows.stored]
        return IN_HALVES.get(kind, kind) if rows.halves else kind
    return BF16 if torch.equal(rows.bfloat16().float(), rows) else F32


def joint_kind(kinds: Collection[int]) -> int:
    """The smallest form of a matrix whose pieces could take these."""
    if len(set(kinds)) == 1:
        return next(iter(kinds))
    if any(kind in PLAIN for kind in kinds):
        return F32
    kinds = [AS_PLAIN_BLOCKS.get(kind, kind) for kind in kinds]
    full = {FULL.get(kind, kind) for kind in kinds}
    kind = full.pop() if len(full) == 1 else INT8_OFFSET  # which holds what INT4 does
    return IN_HALVES[kind] if all(kind in FULL for kind in kinds) else kind


def packed_rows(rows: Rows, kind: int) -> Tensor:
    """Rows as the kernels read them. 32 must divide the number of all but a matrix's last rows."""
    if isinstance(rows, StoredRows):
        if FULL.get(kind, kind) == OF_STORED[rows.stored]:
            data = torch.empty(packed_shape(kind, *rows.shape), dtype=torch.uint8)
            return rows.packed_into(data, kind)
        rows = rows.others()
    if isinstance(rows, Blocks) and kind not in PLAIN:
        return _pack_blocks(rows, kind)
    return _pack_plain(expanded(rows).to(PLAIN[kind]))


def packed_shape(kind: int, outputs: int, inputs: int) -> tuple[int, ...]:
    """The shape of a packed matrix: of numbers for plain kinds, else of bytes."""
    panels = -(-outputs // (2 * LANES)) * 2
    if kind in PLAIN:
        return (panels, -(-inputs // OCTET) * OCTET, LANES)
    whole = SUPER if kind in SUPER_BLOCKS else group_of(kind)
    return (panels, inputs // whole, sum(field.num_bytes for field in fields(kind)))


def group_of(kind: int) -> int:
    return 16 if kind in FINE else 32


@dataclass(frozen=True)
class Field:
    """`count` numbers of each of the sixteen lanes of a panel, side by side for each number."""

    dtype: torch.dtype
    count: int

    @property
    def num_bytes(self) -> int:
        return LANES * self.count * self.dtype.itemsize


def fields(kind: int) -> list[Field]:
    """The fields of a panel, one after another, for the inputs that belong together: a group of
    them, or all that share factors."""
    numbers = 1 if kind in WITHOUT_OFFSETS else 2
    words = Field(torch.int32, group_of(kind) // (8 if kind in FOUR_BITS else 4))
    if kind not in SUPER_BLOCKS:
        scales = Field(torch.float16 if kind in FULL else torch.float32, numbers)
        return [scales, words]
    if kind == INT6_SUPER:  # lower four bits, then the upper two
        words = Field(torch.int32, 3)
    groups = [Field(torch.uint8, numbers), words] * (SUPER // group_of(kind))
    return [Field(torch.float16, numbers), *groups]


def expanded(rows: Rows) -> Tensor:
    rows = as_others(rows)
    return rows.expand() if isinstance(rows, Blocks) else rows


def as_others(rows: Rows) -> Blocks | Tensor:
    return rows.others() if isinstance(rows, StoredRows) else rows


def joined(parts: Sequence[Rows]) -> Rows:
    """Several weights that read the same input, as one."""
    if (stored := of_one_type(parts)) is not None:
        return like_rows(torch.cat, stored, lambda: joined([as_others(part) for part in parts]))
    if (blocks := alike(parts)) is not None:
        return joined_blocks(blocks)
    return torch.cat([expanded(part) for part in parts])


def interleaved_rows(first: Rows, second: Rows) -> Rows:
    if (stored := of_one_type([first, second])) is not None:
        return like_rows(
            lambda x: interleaved(*x),
            stored,
            lambda: interleaved_rows(as_others(first), as_others(second)),
        )
    if (blocks := alike([first, second])) is not None:
        return interleaved_blocks(*blocks)
    return interleaved(expanded(first), expanded(second))


def interleaved(first_OI: Tensor, second_OI: Tensor) -> Tensor:
    """Panels of two matrices alternating, as the gated MLP's phase reads them."""
    return torch.cat([_by_panel(first_OI), _by_panel(second_OI)], dim=1).flatten(0, 1)


def interleaved_blocks(first: Blocks, second: Blocks) -> Blocks:
    return like(lambda x: interleaved(*x), [first, second])


def joined_blocks(parts: list[Blocks]) -> Blocks:
    return like(torch.cat, parts)


def like(arrange: Callable[[list[Tensor]], Tensor], parts: Sequence[Blocks]) -> Blocks:
    """Blocks whose rows are those of the parts, arranged."""
    offsets = [part.offsets_OQ for part in parts if part.offsets_OQ is not None]
    shared = all(part.factors for part in parts)
    factors = zip(*(part.factors for part in parts), strict=True) if shared else ()
    return Blocks(
        arrange([part.codes_OI for part in parts]),
        arrange([part.scales_OQ for part in parts]),
        arrange(offsets) if offsets else None,
        tuple(arrange(list(same)) for same in factors),
    )


def can_join(parts: Sequence[Rows]) -> bool:
    """Whether all are blocks that one matrix can hold."""
    forms = {_form_of(part) for part in parts}
    return len(forms) == 1 and None not in forms


def _form_of(rows: Rows) -> tuple[int, bool] | None:
    """(numbers of a group, whether it has no offsets); None for plain numbers."""
    if isinstance(rows, Blocks):
        return rows.group, rows.offsets_OQ is None
    if isinstance(rows, StoredRows):
        kind = OF_STORED[rows.stored]
        return group_of(kind), kind in WITHOUT_OFFSETS
    return None


def alike(parts: Sequence[Rows]) -> list[Blocks] | None:
    """The parts, if all are blocks and can be stored in one matrix; else None."""
    if not can_join(parts):
        return None
    others = [part for part in map(as_others, parts) if isinstance(part, Blocks)]
    return others if len(others) == len(parts) else None


def of_one_type(parts: Sequence[Rows]) -> list[StoredRows] | None:
    """The parts, if all lie in a file as blocks of one type; else None."""
    stored = [part for part in parts if isinstance(part, StoredRows)]
    types = {part.stored for part in stored}
    return stored if len(stored) == len(parts) and len(types) == 1 else None


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
    """[U, Q, bytes]: scales, offsets, codes of a group, lane by lane; with shared factors
    [U, I / 256, bytes]: these and then the groups."""
    codes_UQSL = even_panels(blocks.codes_OI).unflatten(2, (-1, blocks.group)).permute(0, 2, 3, 1)
    if kind in FOUR_BITS:
        code_bytes = _nibbles(codes_UQSL)
    elif kind == INT6_SUPER:
        code_bytes = _six_bits(codes_UQSL + 32)
    else:
        code_bytes = _by_quads(codes_UQSL).flatten(2)
    if kind not in SUPER_BLOCKS:
        headers = _lanes(blocks.parts, torch.float16 if kind in FULL else torch.float32)
        return torch.cat([*headers, code_bytes], dim=2).contiguous()
    whole = torch.cat([*_lanes(blocks.bytes_of_scales(), torch.uint8), code_bytes], dim=2)
    factors = _lanes(blocks.factors, torch.float16)
    groups = whole.unflatten(1, (factors[0].shape[1], -1)).flatten(2)
    return torch.cat([*factors, groups], dim=2).contiguous()


def _lanes(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """[U, Q, bytes of 16 lanes] of each [O, Q]."""
    return [
        even_panels(part.to(dtype)).transpose(1, 2).contiguous().view(torch.uint8) for part in parts
    ]


def _nibbles(codes_UQSL: Tensor) -> Tensor:
    """Four bits of each of eight inputs of a lane in a word."""
    octets = codes_UQSL.unflatten(2, (-1, OCTET))  # [U, Q, S / 8, 8, 16]
    words = torch.zeros(octets.shape[:3] + octets.shape[4:], dtype=torch.int32)
    for position in range(OCTET):
        words |= (octets[:, :, :, position].to(torch.int32) & 15) << 4 * position
    return words.view(torch.uint8).flatten(2)


def _by_quads(codes_UQSL: Tensor) -> Tensor:
    """For each octet: a lane's even inputs in four bytes, then its odd ones."""
    octets = codes_UQSL.to(torch.int8).unflatten(2, (-1, OCTET // 2, 2))
    return octets.permute(0, 1, 2, 4, 5, 3).contiguous().view(torch.uint8)


def _six_bits(codes_UQSL: Tensor) -> Tensor:
    """The lower four bits as `_nibbles`, then the upper two: of the even inputs of the first octet
    in the lowest bits of four bytes, of its odd ones in the next, then of the second octet."""
    quads = _by_quads(codes_UQSL >> 4).flatten(3, 3)  # [U, Q, octet, odd, lane, 4 bytes]
    high = torch.zeros(quads.shape[:2] + quads.shape[4:], dtype=torch.uint8)
    for octet in range(2):
        for odd in range(2):
            high |= quads[:, :, octet, odd] << 2 * (2 * octet + odd)
    return torch.cat([_nibbles(codes_UQSL), high.flatten(2)], dim=2)
