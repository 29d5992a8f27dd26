"""Dequantises blocks of GGUF files where torch holds them, as the gguf package does on the host:
the same numbers, bit for bit, since each operation rounds as numpy's.

Shapes: M blocks, S bytes of one, G groups of a block, X numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Codes that stand for numbers which are not evenly spaced: IQ4_NL, IQ4_XS.
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SIX_BITS, LOW_BITS, UPPER_TWO = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030  # of each of four bytes
WORDS = {1: torch.uint8, 4: torch.int32}  # bytes that are shifted at once: four where they lie so
# codes_MX, scales_MG, offsets_MG or None: a number is code * scale + offset
Parts = tuple[Tensor, Tensor, Tensor | None]


def dequantised(raw: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """Float32 numbers [..., columns] of rows of bytes [..., bytes] of a kind in KINDS, in `out`
    where it is given."""
    if kind in PLAIN:
        numbers = raw.view(PLAIN[kind])
        return numbers.float() if out is None else out.copy_(numbers)
    size, parts_of = KINDS[kind]
    codes_MX, scales_MG, offsets_MG = parts_of(raw.reshape(-1, size))
    if out is None:
        out = torch.empty(*raw.shape[:-1], codes_MX[0].numel() * raw.shape[-1] // size,
                          dtype=torch.float32, device=raw.device)  # fmt: skip
    numbers_MGX = out.view(*scales_MG.shape, -1)
    numbers_MGX.copy_(codes_MX.view_as(numbers_MGX)).mul_(scales_MG[..., None])
    if offsets_MG is not None:
        numbers_MGX.add_(offsets_MG[..., None])
    return out


def _half(raw_MS: Tensor, at: int) -> Tensor:
    return raw_MS[:, at : at + 2].contiguous().view(torch.float16).float()


def _codes(raw_MS: Tensor, bits: int, count: int) -> Tensor:
    """Codes of so many bits: the lowest of `count` bytes in a row, then the next ones of these."""
    width = 1 if count % 4 else 4
    bytes_MS = raw_MS.clone(memory_format=torch.contiguous_format)
    words_MXC = bytes_MS.view(WORDS[width]).unflatten(1, (-1, count // width))
    codes_MXPC = words_MXC.new_empty(*words_MXC.shape[:2], 8 // bits, count // width)
    mask = int.from_bytes([(1 << bits) - 1] * width, "little")
    for part in range(8 // bits):
        place = codes_MXPC[:, :, part]
        torch.bitwise_right_shift(words_MXC, bits * part, out=place)
        place.bitwise_and_(mask)
    return codes_MXPC.view(torch.uint8).flatten(1)


def _less(codes: Tensor, middle: int) -> Tensor:
    return codes.view(torch.int8).sub_(middle)


def _q4_0(raw: Tensor) -> Parts:
    return _less(_codes(raw[:, 2:], 4, 16), 8), _half(raw, 0), None


def _q4_1(raw: Tensor) -> Parts:
    return _codes(raw[:, 4:], 4, 16), _half(raw, 0), _half(raw, 2)


def _five_bits(raw: Tensor, at: int) -> Tensor:
    """The fifth bits lie in four bytes in front of the others."""
    high, low = _codes(raw[:, at : at + 4], 1, 1), _codes(raw[:, at + 4 :], 4, 16)
    return low.bitwise_or_(high << 4)


def _q5_0(raw: Tensor) -> Parts:
    return _less(_five_bits(raw, 2), 16), _half(raw, 0), None


def _q5_1(raw: Tensor) -> Parts:
    return _five_bits(raw, 4), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Tensor) -> Parts:
    return raw[:, 2:].contiguous().view(torch.int8), _half(raw, 0), None


def _q2_k(raw: Tensor) -> Parts:
    scales = _half(raw, 80) * (raw[:, :16] & 15).float()
    minima = _half(raw, 82) * (raw[:, :16] >> 4).float()
    return _codes(raw[:, 16:80], 2, 32), scales, -minima


def _q3_k(raw: Tensor) -> Parts:
    low, high = _codes(raw[:, 96:104], 4, 8), _codes(raw[:, 104:108], 2, 4)
    scales = _half(raw, 108) * ((low | (high << 4)).float() - 32)
    # The offset is subtracted where a bit is 0.
    third = _codes(raw[:, :32], 1, 32)
    return _less(_codes(raw[:, 32:96], 2, 32).bitwise_or_(third << 2), 4), scales, None


def _scales_and_minima(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K: six bits each, times a factor."""
    first, second, both = raw[:, 4:16].contiguous().view(torch.int32).unbind(1)  # four at once
    scales = [first & SIX_BITS, (both & LOW_BITS) | ((first >> 2) & UPPER_TWO)]
    minima = [second & SIX_BITS, ((both >> 4) & LOW_BITS) | ((second >> 2) & UPPER_TWO)]
    whole = torch.stack([*scales, *minima], dim=1).view(torch.uint8).float()
    return _half(raw, 0) * whole[:, :8], _half(raw, 2) * whole[:, 8:]


def _q4_k(raw: Tensor) -> Parts:
    scales, minima = _scales_and_minima(raw)
    return _codes(raw[:, 16:], 4, 32), scales, -minima


def _q5_k(raw: Tensor) -> Parts:
    scales, minima = _scales_and_minima(raw)
    high = _codes(raw[:, 16:48], 1, 32)
    return _codes(raw[:, 48:], 4, 32).bitwise_or_(high.bitwise_left_shift_(4)), scales, -minima


def _q6_k(raw: Tensor) -> Parts:
    scales = _half(raw, 208) * raw[:, 192:208].view(torch.int8).float()
    high = _codes(raw[:, 128:192], 2, 32).bitwise_left_shift_(4)
    return _less(_codes(raw[:, :128], 4, 64).bitwise_or_(high), 32), scales, None


def _uneven(codes: Tensor) -> Tensor:
    return torch.tensor(UNEVEN, dtype=torch.int8, device=codes.device)[codes.int()]


def _iq4_nl(raw: Tensor) -> Parts:
    return _uneven(_codes(raw[:, 2:], 4, 16)), _half(raw, 0), None


def _iq4_xs(raw: Tensor) -> Parts:
    low, high = _codes(raw[:, 4:8], 4, 1), _codes(raw[:, 2:4], 2, 1)
    scales = _half(raw, 0) * ((low | (high << 4)).float() - 32)
    return _uneven(_codes(raw[:, 8:], 4, 16)), scales, None


KINDS: dict[str, tuple[int, Callable[[Tensor], Parts]]] = {  # bytes of a block, its parts
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0), "Q2_K": (84, _q2_k), "Q3_K": (110, _q3_k), "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k), "IQ4_NL": (18, _iq4_nl), "IQ4_XS": (136, _iq4_xs),
}  # fmt: skip
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EVERYWHERE = frozenset({*KINDS, *PLAIN})  # kinds that `dequantised` knows
