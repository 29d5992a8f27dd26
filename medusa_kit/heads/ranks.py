"""Logits of one head in the dtypes that training and drafting share, and ranks of true tokens.

A rank is a token's place by logit descending, then token id ascending, as in drafting.

Shapes: D hidden, K heads, J = K + 1 tokens ahead, R columns of the projection, P positions,
C positions of one chunk, X any leading shape.
"""

import torch
from torch import Tensor

from medusa_kit.heads.kinds import MedusaHeads

UNAVAILABLE = -1  # no true token there: past the end of the answer
MISSING = 32767  # the true token is outside the projection, or its rank beyond num_ranks


def head_parameter_dtype(heads: MedusaHeads) -> torch.dtype:
    return next(heads.parameters()).dtype


def project_rows(heads: MedusaHeads, z_XD: Tensor, k: int) -> Tensor:
    """logits_XR of head k from z in any dtype.

    Frozen projections are rows of the base, so they are computed in its dtype even while the blocks
    train in float32; `own` ones are computed in theirs. Under autocast both are in its dtype.
    """
    own = heads.config.projection == "own"
    dtype = head_parameter_dtype(heads) if own else heads.base.dtype
    if torch.is_autocast_enabled(z_XD.device.type):  # so that rows of the base are cast only once
        dtype = torch.get_autocast_dtype(z_XD.device.type)
    return heads.project(z_XD.to(dtype), k)


@torch.no_grad()
def token_ranks(
    heads: MedusaHeads,
    hidden_PD: Tensor,
    ahead_PJ: Tensor,
    num_ranks: int,
    chunk_positions: int = 1024,
) -> Tensor:
    """ranks_PK (int16, on the CPU): the rank, from 0, at which each head has its target token.

    ahead_PJ: the true tokens ahead of each position, first the root, then each head's target; -1
    where there is none. Heads that read the path get the true one. Ranks from `num_ranks` on and
    targets outside the projection become MISSING, absent targets UNAVAILABLE. The largest block of
    logits is [chunk_positions, R].
    """
    ranks_PK = torch.full(ahead_PJ[:, 1:].shape, UNAVAILABLE, dtype=torch.int16)
    dtype = head_parameter_dtype(heads)
    for start in range(0, len(hidden_PD), chunk_positions):
        rows = slice(start, start + chunk_positions)
        hidden_CD = hidden_PD[rows].to(heads.base.device, dtype)
        ahead_CJ = ahead_PJ[rows].to(heads.base.device, torch.int64)
        for k, z_CD in enumerate(heads.transforms(hidden_CD, ahead_CJ)):
            logits_CR = project_rows(heads, z_CD, k)
            targets_C = ahead_CJ[:, k + 1]
            ranks_C = _ranks(logits_CR, heads.to_columns(targets_C), num_ranks)
            ranks_C = ranks_C.masked_fill(targets_C < 0, UNAVAILABLE)
            ranks_PK[rows, k] = ranks_C.to("cpu", torch.int16)
    return ranks_PK


def _ranks(logits_CR: Tensor, columns_C: Tensor, num_ranks: int) -> Tensor:
    """Ties are broken by column, since columns ascend in token id. A token whose logit is NaN or
    infinite is a miss, and one beside it is above all others, as in drafting."""
    index_C1 = columns_C.clamp_min(0)[:, None]
    truth_C1 = logits_CR.gather(1, index_C1)
    column_R = torch.arange(logits_CR.shape[1], device=logits_CR.device)
    above_C = logits_CR.shape[1] - (logits_CR <= truth_C1).sum(1)  # NaN is not below anything
    tied_C = ((logits_CR == truth_C1) & (column_R < index_C1)).sum(1)
    ranks_C = above_C + tied_C
    missed_C = (columns_C < 0) | (ranks_C >= num_ranks) | ~truth_C1[:, 0].isfinite()
    return ranks_C.masked_fill(missed_C, MISSING)
