"""Tree attention by torch's scaled_dot_product_attention and a 4-D mask: CPU, fallback, reference.

The query heads of a group are packed as rows of one head. So keys and values need not be repeated,
which would copy more the longer the prefix is.

Shapes: B batch, H query heads, G key/value heads, N nodes with root, L slots in sight, E head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_kit.infer.attention.backend import AttentionCall


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """SDPA by torch's other kernels. cuDNN's, which torch prefers on newer devices, is planned anew
    for each length of the keys, which are others in every step."""
    if device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def tree_sdpa(call: AttentionCall) -> Tensor:
    """Attention output [B, N, H, E]."""
    query_BHNE, key_BGLE, value_BGLE = call.query_BHNE, call.key_BGLE, call.value_BGLE
    if not call.standard:
        mask_B1NL = call.step.mask(call.window)
        out = explicit(
            query_BHNE, key_BGLE, value_BGLE, mask_B1NL, call.scale, call.softcap, call.sinks_H
        )
    elif call.is_causal:
        out = F.scaled_dot_product_attention(
            query_BHNE, key_BGLE, value_BGLE, is_causal=True, scale=call.scale, enable_gqa=True
        )
    else:
        out = _packed(call)
    return out.transpose(1, 2).contiguous()


def _packed(call: AttentionCall) -> Tensor:
    B, H, N, E = call.query_BHNE.shape
    G, dtype = call.key_BGLE.shape[1], call.query_BHNE.dtype
    mask = None if call.sees_all else call.step.additive_mask(call.window, H // G, dtype)
    packed = call.query_BHNE.reshape(B, G, H // G * N, E)
    out = F.scaled_dot_product_attention(
        packed, call.key_BGLE, call.value_BGLE, attn_mask=mask, scale=call.scale
    )
    return out.reshape(B, H, N, out.shape[-1])


def explicit(
    query_BHNE: Tensor,
    key_BGLE: Tensor,
    value_BGLE: Tensor,
    mask_B1NL: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """The formula written out, for soft caps and sinks, which SDPA lacks: [B, H, N, E].

    `mask_B1NL`: what is seen (bool), or what is added to the scores, as SDPA takes either.
    """
    repeats = query_BHNE.shape[1] // key_BGLE.shape[1]
    key_BHLE = key_BGLE.repeat_interleave(repeats, dim=1)
    value_BHLE = value_BGLE.repeat_interleave(repeats, dim=1)
    scores_BHNL = query_BHNE @ key_BHLE.transpose(-1, -2) * scale
    if softcap is not None:
        scores_BHNL = torch.tanh(scores_BHNL / softcap) * softcap
    if mask_B1NL.dtype is torch.bool:
        scores_BHNL = scores_BHNL.masked_fill(~mask_B1NL, torch.finfo(scores_BHNL.dtype).min)
    else:
        scores_BHNL = scores_BHNL + mask_B1NL
    if sinks_H is not None:  # one more column of weights, without a value
        sink_BHN1 = sinks_H.view(1, -1, 1, 1).expand(*scores_BHNL.shape[:3], 1)
        scores_BHNL = torch.cat([scores_BHNL, sink_BHN1.to(scores_BHNL)], dim=-1)
    weights_BHNL = scores_BHNL.float().softmax(-1).to(value_BHLE.dtype)
    return weights_BHNL[..., : value_BHLE.shape[2]] @ value_BHLE
