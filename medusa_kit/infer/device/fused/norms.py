"""The residual stream: what a block has computed is added, and the next block gets it normed.

Shapes: D hidden. A program has one node.
"""

import triton
import triton.language as tl


@triton.jit
def normed(value, weight, size, epsilon, ROUNDS_FIRST: tl.constexpr, dtype: tl.constexpr):
    """x / rms(x) · w, rounded where the family rounds: before the weight, or once at the end."""
    scaled = value / tl.sqrt(tl.sum(value * value, 0) / size + epsilon)
    if ROUNDS_FIRST:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * weight).to(dtype).to(tl.float32)


@triton.jit
def add_norm_kernel(
    added, stream, after_weight, before_weight, out, size, epsilon,
    ADDS: tl.constexpr, SANDWICH: tl.constexpr, ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """stream += added (normed first, in a sandwich); out = norm(stream)."""
    node = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    in_row = d < size
    dtype: tl.constexpr = out.dtype.element_ty
    value = tl.load(stream + node * size + d, mask=in_row, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(added + node * size + d, mask=in_row, other=0.0).to(tl.float32)
        if SANDWICH:
            after = tl.load(after_weight + d, mask=in_row, other=0.0)
            more = normed(more, after, size, epsilon, ROUNDS_FIRST, dtype)
        value = (value + more).to(dtype).to(tl.float32)
        tl.store(stream + node * size + d, value.to(dtype), mask=in_row)
    before = tl.load(before_weight + d, mask=in_row, other=0.0)
    value = normed(value, before, size, epsilon, ROUNDS_FIRST, dtype)
    tl.store(out + node * size + d, value.to(dtype), mask=in_row)
