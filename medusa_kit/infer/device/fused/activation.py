"""act(gate) · up.

Shapes: M size of the MLP. A program has a piece of one node.
"""

import triton
import triton.language as tl


@triton.jit
def _activated(value, GELU: tl.constexpr):
    if GELU:  # by tanh: (1 + tanh(y)) / 2 = sigmoid(2y)
        cubic = value + 0.044715 * value * value * value
        return value * tl.sigmoid(1.5957691216057308 * cubic)
    return value * tl.sigmoid(value)


@triton.jit
def activation_kernel(gate_up, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """gate_up [T, 2M], the gates first, to out [T, M]."""
    node = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = m < size
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.load(gate_up + node * 2 * size + m, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (node * 2 + 1) * size + m, mask=in_row, other=0.0).to(tl.float32)
    activated = _activated(gate, GELU).to(dtype).to(tl.float32)
    tl.store(out + node * size + m, (activated * up).to(dtype), mask=in_row)
