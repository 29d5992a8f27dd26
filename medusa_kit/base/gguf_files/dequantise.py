"""Dequantises blocks of GGUF files where torch holds them, as the gguf package does on the host:
the same numbers, bit for bit, since each operation rounds as numpy's.

Shapes: M blocks, S bytes of one, G groups of a block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Codes that stand for numbers which are not evenly spaced: IQ4_NL, IQ4_XS.
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantised(raw: Tensor, kind: str) -> Tensor:
    """Float32 numbers [..., columns] of rows of bytes [..., bytes] of a kind in KINDS."""
    if kind in PLAIN:
        return raw.view(PLAIN[kind]).float()
    size, of_blocks = KINDS[kind]
    return of_blocks(raw.reshape(-1, size)).reshape(*raw.shape[:-1], -1)


def _half(raw_MS: Tensor, at: int) -> Tensor:
    return raw_MS[:, at : at + 2].contiguous().view(torch.float16).float()


def _codes(raw_MS: Tensor, bits: int, count: int) -> Tensor:
    """Codes of so many bits: the lowest of `count` bytes in a row, then the next ones of these."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw_MS.device)[:, None]
    bytes_MXC = raw_MS.reshape(len(raw_MS), -1, 1, count)
    return ((bytes_MXC >> shifts) & ((1 << bits) - 1)).flatten(1)


def _in_groups(codes: Tensor, scales_MG: Tensor) -> Tensor:
    """Codes as float32 [M, G, X]."""
    return codes.reshape(*scales_MG.shape, -1).float()


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * (_codes(raw[:, 2:], 4, 16).float() - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _codes(raw[:, 4:], 4, 16).float() + _half(raw, 2)


def _five_bits(raw: Tensor, at: int) -> Tensor:
    """The fifth bits lie in four bytes in front of the others."""
    high, low = _codes(raw[:, at : at + 4], 1, 1), _codes(raw[:, at + 4 :], 4, 16)
    return (low | (high << 4)).float()


def _q5_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * (_five_bits(raw, 2) - 16)


def _q5_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _five_bits(raw, 4) + _half(raw, 2)


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:].view(torch.int8).float() * _half(raw, 0)


def _q2_k(raw: Tensor) -> Tensor:
    scales = _half(raw, 80) * (raw[:, :16] & 15).float()
    minima = _half(raw, 82) * (raw[:, :16] >> 4).float()
    codes = _in_groups(_codes(raw[:, 16:80], 2, 32), scales)
    return scales[..., None] * codes - minima[..., None]


def _q3_k(raw: Tensor) -> Tensor:
    low, high = _codes(raw[:, 96:104], 4, 8), _codes(raw[:, 104:108], 2, 4)
    scales = _half(raw, 108) * ((low | (high << 4)).float() - 32)
    # The offset is subtracted where a bit is 0.
    less = (_codes(raw[:, :32], 1, 32) ^ 1) << 2
    codes = _codes(raw[:, 32:96], 2, 32).float() - less.float()
    return scales[..., None] * _in_groups(codes, scales)


def _scales_and_minima(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: six bits each, times a factor."""
    first, second, both = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat([first & 63, (both & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (both >> 4) | ((second >> 2) & 48)], dim=1)
    return _half(raw, 0) * scales.float(), _half(raw, 2) * minima.float()


def _q4_k(raw: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(raw)
    codes = _in_groups(_codes(raw[:, 16:], 4, 32), scales)
    return scales[..., None] * codes - minima[..., None]


def _q5_k(raw: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(raw)
    codes = _codes(raw[:, 48:], 4, 32) | (_codes(raw[:, 16:48], 1, 32) << 4)
    return scales[..., None] * _in_groups(codes, scales) - minima[..., None]


def _q6_k(raw: Tensor) -> Tensor:
    scales = _half(raw, 208) * raw[:, 192:208].view(torch.int8).float()
    codes = _codes(raw[:, :128], 4, 64) | (_codes(raw[:, 128:192], 2, 32) << 4)
    return scales[..., None] * (_in_groups(codes, scales) - 32)


def _uneven(codes: Tensor) -> Tensor:
    return torch.tensor(UNEVEN, dtype=torch.float32, device=codes.device)[codes.int()]


def _iq4_nl(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _uneven(_codes(raw[:, 2:], 4, 16))


def _iq4_xs(raw: Tensor) -> Tensor:
    low, high = _codes(raw[:, 4:8], 4, 1), _codes(raw[:, 2:4], 2, 1)
    scales = _half(raw, 0) * ((low | (high << 4)).float() - 32)
    return scales[..., None] * _in_groups(_uneven(_codes(raw[:, 8:], 4, 16)), scales)


KINDS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {  # bytes of a block, its numbers
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0), "Q2_K": (84, _q2_k), "Q3_K": (110, _q3_k), "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k), "IQ4_NL": (18, _iq4_nl), "IQ4_XS": (136, _iq4_xs),
}  # fmt: skip
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EVERYWHERE = frozenset({*KINDS, *PLAIN})  # kinds that `dequantised` knows
