"""Tree attention whose sums go by absolute positions alone.

Each node's keys are summed in an order that follows from its own position: first those of the
prefix, in splits that begin at fixed positions; then the tail, the last 48 to 63 positions, in
order of position. An ancestor that is not committed yet is summed in the place that it will have,
wherever it lies in the cache. So a node gets the same bits as a draft token and as text, in any
slot, alone or beside others.

Only the tail looks at where ancestors lie. Those further up lie where they will stay, since a tree
as deep as that begins as a chain, or it does not run here. Nodes in row -1 fill a forward up: they
write nothing to the cache.

Shapes: T nodes, N of a row at most, B rows, H query heads, G key/value heads, M query heads of a
group, E head dim, S slots, C places of a tail.
"""

import triton
import triton.language as tl

from medusa_kit.infer.attention.triton_kernel import absorb

TAIL = tl.constexpr(64)  # places, in which a node's last positions are
STEP = tl.constexpr(16)  # tails begin at its multiples
DEEPEST = tl.constexpr(47)  # ancestors up to so far away are in the tail: TAIL - STEP - 1
FIRST_SPLIT = tl.constexpr(128)  # positions; doubled after each so many splits:
SAME_SPLITS = tl.constexpr(16)


@triton.jit
def _tail_of(position):
    """The first position of a node's tail."""
    return tl.maximum(position - DEEPEST, 0) // STEP * STEP


@triton.jit
def _split_start(split):
    """Long texts have longer splits behind, so that there are few."""
    doubled = split // SAME_SPLITS
    skipped = ((1 << doubled) - 1) * (SAME_SPLITS * FIRST_SPLIT)
    return skipped + split % SAME_SPLITS * (FIRST_SPLIT << doubled)


@triton.jit(do_not_specialize=["num_words", "num_nodes"])
def places_kernel(
    rows, depths, words, firsts, lengths, places, num_words, num_nodes, BLOCK: tl.constexpr
):
    """places [T, C]: the slots of a node's last positions. One program for each node."""
    node = tl.program_id(0)
    row = tl.load(rows + node)
    if row >= 0:
        length = tl.load(lengths + row).to(tl.int32)
        start = _tail_of(length + tl.load(depths + node).to(tl.int32))
        places += node * TAIL
        c = tl.arange(0, TAIL)
        tl.store(places + c, start + c, mask=start + c < length)
        first = tl.load(firsts + row)
        for begin in range(0, num_nodes, BLOCK):
            other = begin + tl.arange(0, BLOCK)
            word = tl.load(words + node * num_words + other // 64, mask=other < num_nodes, other=0)
            is_ancestor = ((word >> (other % 64).to(tl.int64)) & 1) == 1
            depth = tl.load(depths + first + other, mask=is_ancestor, other=0).to(tl.int32)
            place = length + depth - start
            tl.store(places + place, length + other, mask=is_ancestor & (place >= 0))


@triton.jit
def _queries_of(queries, node, head, live, E: tl.constexpr, BLOCK_E: tl.constexpr, H: tl.constexpr):
    e = tl.arange(0, BLOCK_E)
    place = queries + ((node * H + head) * E)[:, None] + e[None, :]
    return tl.load(place, mask=live[:, None] & (e < E)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_nodes", "num_slots", "window"])
def prefix_kernel(
    queries, keys, values, depths, firsts, counts, lengths, partials, lses, num_nodes, num_slots,
    scale, window, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """partials [splits, T, H, E] and lses [splits, T, H]: a tile of one group's query rows over one
    split of the positions before their tails. Nothing is written behind a row's own splits."""
    M: tl.constexpr = H // G
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    count, first = tl.load(counts + b), tl.load(firsts + b)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = r < count * M
    node, head = first + r // M, g * M + r % M
    length = tl.load(lengths + b).to(tl.int32)
    position = length + tl.load(depths + node, mask=live, other=0).to(tl.int32)
    end = tl.where(live, _tail_of(position), 0)
    split = tl.program_id(2)
    start, last = _split_start(split), tl.minimum(_split_start(split + 1), tl.max(end, 0))
    if start < last:
        keys += (b.to(tl.int64) * G + g) * num_slots * E
        values += (b.to(tl.int64) * G + g) * num_slots * E
        query = _queries_of(queries, node, head, live, E, BLOCK_E, H)
        out = tl.zeros([BLOCK_R, BLOCK_E], dtype=tl.float32)
        top = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_R], dtype=tl.float32)
        if HAS_WINDOW:  # blocks that no node sees are not read; they would add nothing
            oldest = tl.min(tl.where(live, position, 2147483647), 0) - window + 1
            start += tl.maximum(oldest - start, 0) // BLOCK_L * BLOCK_L
        for at in range(start, last, BLOCK_L):
            slots = at + tl.arange(0, BLOCK_L)
            in_sight = slots < last
            seen = slots[None, :] < end[:, None]
            if HAS_WINDOW:
                seen = seen & (position[:, None] - slots[None, :] < window)
            out, top, total = absorb(
                query, keys, values, slots, in_sight, seen, out, top, total, E, 1, E, 1, scale,
                0.0, E, E, False, BLOCK_E, BLOCK_E,
            )  # fmt: skip
        some = total > 0
        divisor = tl.where(some, total, 1.0)
        place = (split.to(tl.int64) * num_nodes + node) * H + head
        e = tl.arange(0, BLOCK_E)
        lse = tl.where(some, top + tl.log(divisor), float("-inf"))
        tl.store(lses + place, lse, mask=live)
        tl.store(
            partials + place[:, None] * E + e[None, :], out / divisor[:, None],
            mask=live[:, None] & (e < E)[None, :],
        )  # fmt: skip


@triton.jit
def _merged(
    partials, lses, node, head, live, prefix_end, top, num_nodes, num_splits,
    H: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The splits of a node's prefix in order, under a maximum that is known before: (sum of values,
    sum of weights, maximum)."""
    s = tl.arange(0, SPLITS)
    is_own = (s < num_splits) & (_split_start(s) < prefix_end)
    place = node.to(tl.int64) * H + head
    stride = num_nodes.to(tl.int64) * H
    every = tl.load(
        lses + s[:, None] * stride + place[None, :], mask=is_own[:, None] & live[None, :],
        other=float("-inf"),
    )  # fmt: skip
    top = tl.maximum(top, tl.max(every, 0))
    e = tl.arange(0, BLOCK_E)
    out = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for split in range(0, tl.sum(is_own.to(tl.int32), 0)):
        at = split * stride + place
        weight = tl.exp(tl.load(lses + at, mask=live, other=float("-inf")) - top)
        partial = tl.load(
            partials + at[:, None] * E + e[None, :],
            mask=(live & (weight > 0))[:, None] & (e < E)[None, :], other=0.0,
        )  # fmt: skip
        out += partial * weight[:, None]
        total += weight
    return out, total, top


@triton.jit(do_not_specialize=["num_nodes", "num_slots", "num_splits", "window"])
def tail_kernel(
    queries, keys, values, places, rows, depths, lengths, partials, lses, out, num_nodes, num_slots,
    num_splits, scale, window, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    HAS_WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out [T, H, E]: the splits of a node's prefix, then its tail. A program has one node and the
    query heads of one group, which see the same keys."""
    M: tl.constexpr = H // G
    node, g = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    live, head = m < M, g * M + m
    row = tl.load(rows + node).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    out += ((node.to(tl.int64) * H + head) * E)[:, None] + e[None, :]
    mask = live[:, None] & (e < E)[None, :]
    if row < 0:
        tl.store(out, tl.zeros([BLOCK_M, BLOCK_E], out.dtype.element_ty), mask=mask)
        return
    position = (tl.load(lengths + row) + tl.load(depths + node)).to(tl.int32)
    start = _tail_of(position)
    keys += (row * G + g) * num_slots * E
    values += (row * G + g) * num_slots * E
    query = _queries_of(queries, node.to(tl.int64), head, live, E, BLOCK_E, H)
    tail = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for first in range(0, TAIL, BLOCK_L):
        c = first + tl.arange(0, BLOCK_L)
        in_sight = start + c <= position
        if HAS_WINDOW:
            in_sight = in_sight & (position - start - c < window)
        slots = tl.load(places + node * TAIL + c, mask=in_sight, other=0)
        seen = in_sight[None, :] & (m >= 0)[:, None]
        tail, top, total = absorb(
            query, keys, values, slots, in_sight, seen, tail, top, total, E, 1, E, 1, scale, 0.0,
            E, E, False, BLOCK_E, BLOCK_E,
        )  # fmt: skip
    prefix, weights, most = _merged(
        partials, lses, node, head, live, start, top, num_nodes, num_splits, H, E, SPLITS, BLOCK_M,
        BLOCK_E,
    )  # fmt: skip
    share = tl.exp(top - most)
    merged = (prefix + tail * share[:, None]) / (weights + total * share)[:, None]
    tl.store(out, merged.to(out.dtype.element_ty), mask=mask)
