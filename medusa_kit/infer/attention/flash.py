"""Tree attention by a flash kernel: the prefix without a mask, the tree densely, then merged.

A flash kernel takes no mask, and the prefix needs none: every node sees all of it. The kernel also
returns the log-sum-exp. So the few slots that only some nodes see (the tree itself, and under a
window the oldest slots) are computed by two small products, and the parts are merged.

The kernel is flash-attn's where installed (version 3, else 2), else the copy inside torch, which
has no soft cap. torch has one for the CPU as well.

Shapes: B batch, H query heads, G key/value heads, M = H / G, N nodes with root, R = M·N packed
rows, L slots in sight, K slots done densely, E head dim.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_kit.infer.attention.backend import CHUNKS, AttentionCall, Case, compute_capability
from medusa_kit.infer.attention.merge import Part, merge
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.attention.step import TreeStep

MAX_HEAD_SIZE = 256
NO_SOFTCAP = "torch's own copy has no soft cap, and flash-attn (extra `flash`) is not there"


@functools.cache
def package(device: str, index: int | None = None) -> Callable[..., Any] | None:
    """flash-attn's function for a cache with a length for each row, or None, for one device.

    Version 4 shares version 2's import name and lacks the function, so versions are compared.
    """
    if device != "cuda" or torch.version.hip:
        return None
    if compute_capability(index)[0] == 9 and importlib.util.find_spec("flash_attn_interface"):
        return importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    try:
        if importlib.metadata.version("flash-attn").split(".")[0] != "2":
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    return importlib.import_module("flash_attn").flash_attn_with_kvcache


def unsupported(case: Case) -> str | None:
    """Why the flash kernels cannot compute this case, or None."""
    if case.chunks:
        return CHUNKS
    if case.head_size != case.value_size:
        return f"keys of {case.head_size} numbers with values of {case.value_size}"
    if case.softcap and package(case.device, case.index) is None:
        return NO_SOFTCAP
    if case.device == "cpu":
        return None
    if case.device != "cuda" or torch.version.hip:
        return f"no kernel for {'ROCm' if torch.version.hip else case.device}"
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"{str(case.dtype).removeprefix('torch.')} (float16 and bfloat16 only)"
    if case.head_size % 8 or case.head_size > MAX_HEAD_SIZE:
        return f"head size {case.head_size} (a multiple of 8, {MAX_HEAD_SIZE} at most)"
    if compute_capability(case.index) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def tree_flash(call: AttentionCall) -> Tensor:
    """Attention output [B, N, H, E]; equal to `tree_sdpa` up to rounding."""
    step, window = call.step, call.slides
    if call.is_causal or call.sees_all:
        return tree_sdpa(call)  # torch chooses a flash kernel itself
    B, H, N, E = call.query_BHNE.shape
    G = call.key_BGLE.shape[1]
    # All query heads of a group read the same keys. As rows of one head they read them once.
    query_BGRE = call.query_BHNE.reshape(B, G, H // G * N, E)
    cut = step.once(("flash", window), lambda: cut_slots(step, window))
    parts = [_dense(query_BGRE, call, cut)]
    if any(start < end for start, end in zip(cut.starts, step.lengths, strict=True)):
        parts.append(_prefix(query_BGRE, call, cut))
    unpacked = [(out.reshape(B, H, N, E), lse.reshape(B, H, N)) for out, lse in parts]
    return merge(unpacked, call.sinks_H).to(query_BGRE.dtype).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Cut:
    """Slots [starts[b], lengths[b]) are seen by every node of row b and go to the kernel.

    The others go to the dense part: `slots_BK`, or if None the last N slots of every row.
    """

    starts: tuple[int, ...]
    slots_BK: Tensor | None
    mask_BNK: Tensor


def cut_slots(step: TreeStep, window: int | None) -> Cut:
    """Which slots every node sees, and which nodes see which of the others."""
    lengths, N = step.lengths, step.num_nodes
    even = min(lengths) == max(lengths)
    if window is None or not step.window_applies(window):
        slots_BK = None if even else _node_slots(step, step.device_lengths(), 0)
        return Cut((0,) * len(lengths), slots_BK, step.sees_BNN)
    # A node is at most N - 1 deep, so all see what the deepest possible one would.
    starts = tuple(min(max(length + N - window, 0), length) for length in lengths)
    lengths_B = step.device_lengths()
    starts_B = (lengths_B + N - window).clamp_min(0).minimum(lengths_B)
    width = min(N, window) - 1  # slots before `starts` that some node sees
    band_BW = _node_slots(step, starts_B, -width)[:, :width]
    tree_BN = _node_slots(step, lengths_B, 0)
    positions_BN = lengths_B[:, None] + step.depths_BN
    distance_BNW = positions_BN[:, :, None] - band_BW[:, None, :]
    distance_BNN = positions_BN[:, :, None] - positions_BN[:, None, :]
    band_mask_BNW = (band_BW >= 0)[:, None, :] & (distance_BNW < window)
    tree_mask_BNN = step.sees_BNN & (distance_BNN < window)
    return Cut(
        starts,
        torch.cat([band_BW.clamp_min(0), tree_BN], 1),
        torch.cat([band_mask_BNW, tree_mask_BNN], 2),
    )


def _node_slots(step: TreeStep, firsts_B: Tensor, shift: int) -> Tensor:
    """N slots of each row from `firsts_B` plus `shift` on, int64 [B, N]."""
    return firsts_B[:, None] + shift + torch.arange(step.num_nodes, device=firsts_B.device)


def _dense(query_BGRE: Tensor, call: AttentionCall, cut: Cut) -> Part:
    """Attention over the slots of the dense part, in float32 or wider."""
    key_BGKE, value_BGKE = (_taken(slots, cut) for slots in (call.key_BGLE, call.value_BGLE))
    wide = torch.promote_types(query_BGRE.dtype, torch.float32)
    scores_BGRK = query_BGRE.to(wide) @ key_BGKE.to(wide).transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores_BGRK = torch.tanh(scores_BGRK / call.softcap) * call.softcap
    B, N, K = cut.mask_BNK.shape
    scores_BGMNK = scores_BGRK.view(B, key_BGKE.shape[1], -1, N, K)
    hidden = ~cut.mask_BNK[:, None, None]
    scores_BGRK = scores_BGMNK.masked_fill(hidden, float("-inf")).view_as(scores_BGRK)
    lse_BGR = scores_BGRK.logsumexp(-1)  # finite: a node sees itself
    return (scores_BGRK - lse_BGR[..., None]).exp() @ value_BGKE.to(wide), lse_BGR


def _taken(slots_BGLE: Tensor, cut: Cut) -> Tensor:
    B, G, L, E = slots_BGLE.shape
    if cut.slots_BK is None:
        return slots_BGLE[:, :, L - cut.mask_BNK.shape[-1] :]
    index = cut.slots_BK[:, None, :, None].expand(B, G, -1, E)
    return slots_BGLE.gather(2, index)


def _prefix(query_BGRE: Tensor, call: AttentionCall, cut: Cut) -> Part:
    """Attention over the slots that all nodes see: one kernel call, or one for each row.

    Only flash-attn's kernel takes a length for each row, and only with a common start.
    """
    step, key_BGLE, value_BGLE = call.step, call.key_BGLE, call.value_BGLE
    start, end = min(cut.starts), max(step.lengths)
    even = min(step.lengths) == end
    if start == max(cut.starts) and (even or package(key_BGLE.device.type, key_BGLE.device.index)):
        counts_B = step.once(
            ("flash counts", start),
            lambda: step.device_lengths().to(torch.int32) - start,
        )
        keys, values = key_BGLE[:, :, start:end], value_BGLE[:, :, start:end]
        return _kernel(query_BGRE, keys, values, counts_B, call)
    rows = []
    for row, (first, last) in enumerate(zip(cut.starts, step.lengths, strict=True)):
        query_1GRE = query_BGRE[row : row + 1]
        if first == last:
            lse = query_1GRE.new_full(query_1GRE.shape[:3], float("-inf"), dtype=torch.float32)
            rows.append((torch.zeros_like(query_1GRE), lse))
            continue
        keys, values = (x[row : row + 1, :, first:last] for x in (key_BGLE, value_BGLE))
        rows.append(_kernel(query_1GRE, keys, values, last - first, call))
    return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])


def _kernel(
    query_BGRE: Tensor,
    key_BGPE: Tensor,
    value_BGPE: Tensor,
    counts: Tensor | int,
    call: AttentionCall,
) -> Part:
    """The flash kernel without a mask over the first `counts` keys of each row."""
    function = package(query_BGRE.device.type, query_BGRE.device.index)
    if function is not None:
        out_BRGE, lse_BGR, *_ = function(
            query_BGRE.transpose(1, 2),
            key_BGPE.transpose(1, 2),
            value_BGPE.transpose(1, 2),
            cache_seqlens=counts,
            softmax_scale=call.scale,
            causal=False,
            softcap=call.softcap or 0.0,
            return_softmax_lse=True,
        )
        # Version 2 reports +inf for a row without keys, version 3 -inf.
        return out_BRGE.transpose(1, 2), lse_BGR.masked_fill(lse_BGR.isinf(), float("-inf"))
    inputs = (query_BGRE, key_BGPE, value_BGPE, 0.0, False)
    if query_BGRE.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *inputs, False, scale=call.scale
        )
        return out, lse
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, scale=call.scale)
