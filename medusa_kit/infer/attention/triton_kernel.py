"""The Triton kernels of tree attention: one over splits of the slots, one that merges the splits.

This module needs triton; `triton_backend` imports it when the backend is first used. A program of
the first kernel holds a tile of one group's query rows (all its query heads, so that keys are read
once). It reads one split of its row's slots: first those of the prefix, which every node sees up to
the window, then those of the tree, by the ancestor bits. Arguments named stride_* count elements.

Shapes: R = M·N query rows of a group (M = query heads a group, N nodes), S splits, E and EV head
dim of keys and values.
"""

import triton
import triton.language as tl


@triton.jit
def absorb(
    query, keys, values, slots, in_sight, seen, out, top, total,
    stride_kl, stride_ke, stride_vl, stride_ve, scale, softcap,
    E: tl.constexpr, EV: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add a block of slots to the running softmax: `out` and `total` are in units of exp(top)."""
    e = tl.arange(0, BLOCK_E)
    v = tl.arange(0, BLOCK_V)
    key = tl.load(
        keys + slots[None, :] * stride_kl + e[:, None] * stride_ke,
        mask=in_sight[None, :] & (e < E)[:, None], other=0.0,
    )  # fmt: skip
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if HAS_CAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
    weights = tl.exp(scores - base[:, None])
    decay = tl.exp(top - base)
    value = tl.load(
        values + slots[:, None] * stride_vl + v[None, :] * stride_ve,
        mask=in_sight[:, None] & (v < EV)[None, :], other=0.0,
    )  # fmt: skip
    more = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return out * decay[:, None] + more, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
def _seen_in_tree(
    words, depths, node, depth, slots, length, in_rows, in_sight, window,
    num_words, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Which of these slots of the tree each row sees; `words` and `depths` are the batch row's."""
    other = slots - length  # the node in a slot
    seen = in_rows[:, None] & in_sight[None, :]
    places = node[:, None] * num_words + (other >> 6)[None, :]
    word = tl.load(words + places, mask=seen, other=0)
    seen = seen & (((word >> (other & 63)[None, :].to(tl.int64)) & 1) == 1)
    if HAS_WINDOW:
        other_depth = tl.load(depths + other, mask=in_sight, other=0)
        seen = seen & (depth[:, None] - other_depth[None, :] < window)
    return seen


@triton.jit
def _write(
    partials, lses, first_row, rows, in_rows, out, top, total,
    EV: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A tile's output and log-sum-exp; 0 and -inf for rows that saw nothing."""
    any_seen = total > 0
    total = tl.where(any_seen, total, 1.0)
    v = tl.arange(0, BLOCK_V)
    offsets = first_row + rows
    tl.store(lses + offsets, tl.where(any_seen, top + tl.log(total), float("-inf")), mask=in_rows)
    tl.store(
        partials + offsets[:, None] * EV + v[None, :], out / total[:, None],
        mask=in_rows[:, None] & (v < EV)[None, :],
    )  # fmt: skip


@triton.jit
def _share(length, num_nodes, window, min_slots, HAS_WINDOW: tl.constexpr):
    """(first, end) of this program's split of the slots that some node sees. They are split by the
    row's own length, so that in a large cache the programs of a short row have work too."""
    first_seen = 0
    if HAS_WINDOW:  # slots that no node sees are not read
        first_seen = tl.maximum(length - window + 1, 0)
    end = length + num_nodes
    chunk = tl.maximum(tl.cdiv(end - first_seen, tl.num_programs(2)), min_slots)
    first = first_seen + tl.program_id(2) * chunk
    return first, tl.minimum(first + chunk, end)


# Numbers that change from step to step are not compiled in: each would need a kernel of its own,
# compiled in the middle of an answer.
@triton.jit(
    do_not_specialize=[
        "window", "num_groups", "num_nodes", "num_rows", "num_words", "min_slots"
    ]
)  # fmt: skip
def split_kernel(
    queries, keys, values, words, depths, lengths, partials, lses,
    stride_qb, stride_qh, stride_qn, stride_qe,
    stride_kb, stride_kg, stride_kl, stride_ke,
    stride_vb, stride_vg, stride_vl, stride_ve,
    scale, softcap, window, num_groups, num_nodes, num_rows, num_words,
    min_slots,
    E: tl.constexpr, EV: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """partials_S(BGR)EV and lses_S(BGR) of one split; a split may hold no slot of a short row."""
    # torch.compile hands numbers over as float64, which would spread to the sums.
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    bg = tl.program_id(1)
    b = (bg // num_groups).to(tl.int64)
    g = (bg % num_groups).to(tl.int64)
    keys += b * stride_kb + g * stride_kg
    values += b * stride_vb + g * stride_vg
    words += b * num_nodes * num_words
    depths += b * num_nodes
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = rows < num_rows
    node = rows % num_nodes
    head = g * (num_rows // num_nodes) + rows // num_nodes
    e = tl.arange(0, BLOCK_E)
    query = tl.load(
        queries + b * stride_qb + (head * stride_qh + node * stride_qn)[:, None]
        + e[None, :] * stride_qe,
        mask=in_rows[:, None] & (e < E)[None, :], other=0.0,
    )  # fmt: skip
    depth = tl.load(depths + node, mask=in_rows, other=0)
    length = tl.load(lengths + b)
    first, last = _share(length, num_nodes, window, min_slots, HAS_WINDOW)
    out = tl.zeros([BLOCK_R, BLOCK_V], dtype=tl.float32)
    top = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_R], dtype=tl.float32)
    for start in range(first, tl.minimum(last, length), BLOCK_L):  # the prefix
        slots = start + tl.arange(0, BLOCK_L)
        in_sight = slots < tl.minimum(last, length)
        seen = in_rows[:, None] & in_sight[None, :]
        if HAS_WINDOW:
            seen = seen & ((length + depth)[:, None] - slots[None, :] < window)
        out, top, total = absorb(
            query, keys, values, slots, in_sight, seen, out, top, total, stride_kl, stride_ke,
            stride_vl, stride_ve, scale, softcap, E, EV, HAS_CAP, BLOCK_E, BLOCK_V,
        )  # fmt: skip
    for start in range(tl.maximum(first, length), last, BLOCK_L):  # the tree
        slots = start + tl.arange(0, BLOCK_L)
        in_sight = slots < last
        seen = _seen_in_tree(words, depths, node, depth, slots, length, in_rows, in_sight, window,
                             num_words, HAS_WINDOW)  # fmt: skip
        out, top, total = absorb(
            query, keys, values, slots, in_sight, seen, out, top, total, stride_kl, stride_ke,
            stride_vl, stride_ve, scale, softcap, E, EV, HAS_CAP, BLOCK_E, BLOCK_V,
        )  # fmt: skip
    first_row = (tl.program_id(2) * tl.num_programs(1) + bg).to(tl.int64) * num_rows
    _write(partials, lses, first_row, rows, in_rows, out, top, total, EV, BLOCK_V)


@triton.jit(do_not_specialize=["num_splits", "num_nodes", "num_heads"])
def merge_kernel(
    partials, lses, sinks, outputs, num_splits, num_nodes, num_heads,
    EV: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """outputs_BNHEV from the splits' partials, a few splits at a time under a running maximum; one
    program for each (b, h, n)."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    n = row % num_nodes
    h = row // num_nodes % num_heads
    b = row // num_nodes // num_heads
    v = tl.arange(0, BLOCK_V)
    top = float("-inf")
    total = 0.0
    if HAS_SINKS:  # part of the softmax, without a value
        top = tl.load(sinks + h)
        total = 1.0
    out = tl.zeros([BLOCK_V], dtype=tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        lse = tl.load(lses + s * num_rows + row, mask=s < num_splits, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # splits that saw nothing so far
        weights = tl.exp(lse - base)
        partial = tl.load(
            partials + (s * num_rows + row)[:, None] * EV + v[None, :],
            mask=(weights > 0)[:, None] & (v < EV)[None, :], other=0.0,
        )  # fmt: skip
        decay = tl.exp(top - base)
        out = out * decay + tl.sum(partial * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        top = new_top
    offset = ((b * num_nodes + n) * num_heads + h) * EV
    tl.store(outputs + offset + v, out / total, mask=v < EV)  # total > 0: a node sees itself
