"""Queries and keys are normed, where the family does so, and rotated; keys and values go into their
slots of the KV cache.

Shapes: T nodes, H query heads, G key/value heads, E head dim, S slots. A program has some heads of
one node, all of one kind.
"""

import triton
import triton.language as tl


@triton.jit
def _normed_halves(
    low, high, weights, j, size, epsilon, ROUNDS_FIRST: tl.constexpr, dtype: tl.constexpr
):
    """Each head by itself; `low` and `high` are the halves of heads [heads, E / 2]."""
    squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    scale = 1.0 / tl.sqrt(squares / size + epsilon)
    low, high = low * scale[:, None], high * scale[:, None]
    if ROUNDS_FIRST:
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    in_half = j < size // 2
    low_weight = tl.load(weights + j, mask=in_half, other=0.0)
    high_weight = tl.load(weights + size // 2 + j, mask=in_half, other=0.0)
    low = (low * low_weight[None, :]).to(dtype).to(tl.float32)
    high = (high * high_weight[None, :]).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def _rotated(low, high, cosines, sines, node, j, E: tl.constexpr, dtype: tl.constexpr):
    """Rounded where transformers rounds: each product, then the sum."""
    in_half = j < E // 2
    cosine = tl.load(cosines + node * E + j, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + node * E + j, mask=in_half, other=0.0).to(tl.float32)[None, :]
    first = (low * cosine).to(dtype).to(tl.float32) - (high * sine).to(dtype).to(tl.float32)
    second = (high * cosine).to(dtype).to(tl.float32) + (low * sine).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _store(place, low, high, mask, HALF: tl.constexpr):
    tl.store(place, low.to(place.dtype.element_ty), mask=mask)
    tl.store(place + HALF, high.to(place.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def rope_kernel(
    qkv, query_norm, key_norm, cosines, sines, rows, slots, queries, keys, values, num_slots,
    epsilon, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, QK_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    """qkv [T, H + 2G heads of E] to queries [T, H, E], and a layer's keys and values
    [B, G, S, E]."""
    node = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    head = first + tl.arange(0, HEADS)
    j = tl.arange(0, HALF)
    mask = (j < E // 2)[None, :] & (head >= 0)[:, None]
    dtype: tl.constexpr = queries.dtype.element_ty
    source = qkv + (node * (H + 2 * G) + head[:, None]) * E + j[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + E // 2, mask=mask, other=0.0).to(tl.float32)
    row, slot = tl.load(rows + node).to(tl.int64), tl.load(slots + node).to(tl.int64)
    if first < H + G:
        if QK_NORM:
            weights = query_norm
            if first >= H:
                weights = key_norm
            low, high = _normed_halves(low, high, weights, j, E, epsilon, ROUNDS_FIRST, dtype)
        low, high = _rotated(low, high, cosines, sines, node, j, E, dtype)
    if first < H:
        place = queries + (node * H + head[:, None]) * E + j[None, :]
        _store(place, low, high, mask, E // 2)
    elif row >= 0:
        group = (head - H) % G
        at = ((row * G + group[:, None]) * num_slots + slot) * E + j[None, :]
        if first < H + G:
            _store(keys + at, low, high, mask, E // 2)
        else:
            _store(values + at, low, high, mask, E // 2)
