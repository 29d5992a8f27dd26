"""Scales and offsets of blocks, group by group: w = code · scale + offset, code an int8.

For types of which `infer/cpu/packed/gguf_blocks.py` has no reader; IQ4_NL and IQ4_XS have codes
from a table of 16. Readers take raw[..., bytes of a block].
"""

import numpy as np

Parts = tuple[np.ndarray, np.ndarray | None]


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    return raw[..., at : at + 2].copy().view(np.float16).astype(np.float32)


def _q2_k(raw: np.ndarray) -> Parts:
    """16 groups of 16: four bits for the scale and four for the minimum."""
    fields = raw[..., :16]
    scales = _half(raw, 80) * (fields & 15).astype(np.float32)
    return scales, -(_half(raw, 82) * (fields >> 4).astype(np.float32))


def _q3_k(raw: np.ndarray) -> Parts:
    """16 groups of 16: four low bits in bytes 96 to 103, two high ones in bytes 104 to 107."""
    low = np.concatenate([raw[..., 96:104] & 15, raw[..., 96:104] >> 4], axis=-1)
    high = np.concatenate([(raw[..., 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return _half(raw, 108) * _six_bits(low, high), None


def _iq4_nl(raw: np.ndarray) -> Parts:
    return _half(raw, 0), None


def _iq4_xs(raw: np.ndarray) -> Parts:
    """Eight groups of 32: two high bits in bytes 2 and 3, four low ones in bytes 4 to 7."""
    shape = (*raw.shape[:-1], 8)
    low = np.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], axis=-1).reshape(shape)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    high = ((raw[..., 2:4, None] >> shifts) & 3).reshape(shape)
    return _half(raw, 0) * _six_bits(low, high), None


def _six_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return (low | high << 4).astype(np.float32) - 32


READERS = {  # type -> (bytes of a block, scales and offsets of its groups)
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
}
