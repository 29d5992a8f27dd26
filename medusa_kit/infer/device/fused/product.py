"""A product with weights whose sums do not depend on how many nodes there are.

A node's outputs are summed over the inputs in blocks of one size, in one order, by one tile,
whatever is computed beside them. Libraries choose tiles by the number of nodes, and so the order.

Shapes: T nodes, K inputs, N outputs.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_nodes"])
def product_kernel(
    inputs, weights, biases, out, num_nodes, K, N,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [T, N] of inputs [T, K] and weights [N, K]. Tiles of nodes that need the same weights run
    one after another, so that these come from memory once."""
    node = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    live, wanted = node < num_nodes, output < N
    inputs += node[None, :].to(tl.int64) * K
    weights += output[:, None].to(tl.int64) * K
    total = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        at = first + k
        weight = tl.load(
            weights + at[None, :], mask=wanted[:, None] & (at < K)[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        value = tl.load(inputs + at[:, None], mask=live[None, :] & (at < K)[:, None], other=0.0)
        total = tl.dot(weight, value, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(biases + output, mask=wanted, other=0.0).to(tl.float32)[:, None]
    place = out + node[None, :].to(tl.int64) * N + output[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=live[None, :] & wanted[:, None])
