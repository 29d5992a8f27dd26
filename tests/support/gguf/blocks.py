"""Random blocks of every type that GGUF files are read of."""

import numpy as np

from medusa_kit.base.gguf_files.types import TYPES

# Type -> where a block has 16-bit floats; all its other bytes may be any.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
SIZES = {kind.name: (kind.numbers, kind.size) for kind in TYPES.values()}


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """As the gguf package writes them: of numbers for F32 and F16, of bytes else."""
    numbers, size = SIZES[kind]
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        plain = rng.normal(0, 0.1, (rows, columns)).astype(np.float32)
        if kind == "BF16":
            return (plain.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return plain.astype(np.float16) if kind == "F16" else plain
    raw = rng.integers(0, 256, (rows, columns // numbers, size), dtype=np.uint8)
    for place in HALVES.get(kind, ()):
        halves = rng.uniform(0.001, 0.1, raw.shape[:2]).astype(np.float16)
        raw[:, :, place : place + 2] = halves[..., None].view(np.uint8)
    if kind == "IQ1_M":  # four bits of its scale lie in the last byte: no infinity
        raw[:, :, -1] = raw[:, :, -1] & 15 | 32
    if kind == "MXFP4":  # an exponent
        raw[:, :, 0] = rng.integers(100, 128, raw.shape[:2])
    return raw.reshape(rows, -1)
