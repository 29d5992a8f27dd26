"""The heads' loss (Medusa, arXiv 2401.10774, §2.2.1), chunk by chunk (chunked.py).

Head k, from 1, has the weight decay^k. A target is one token, or in part (`soft_share`) the base's
own distribution at that place, cut to its likeliest tokens (self-distillation as in Hydra++, arXiv
2402.05109, §4).

A loss is a mean over the whole update: each micro-batch divides by the update's counts, so the
gradient does not depend on how an update is cut into micro-batches and spread over processes.

Shapes: P positions, D hidden, K heads, J = K + 1 tokens ahead, S likeliest tokens of the base, or
tokens that share one target.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.ranks import head_parameter_dtype, project_rows
from medusa_kit.settings.recipe import TrainSection
from medusa_kit.train.loss.chunked import SharedTargets, chunked_loss

SOFT_SHARES = {"cross_entropy": 0.0, "soft": 0.5, "lk": 1.0}  # defaults


class SoftTargets(NamedTuple):
    """The base's likeliest tokens at each head's target, and their probabilities."""

    ids_PKS: Tensor
    probabilities_PKS: Tensor


class SoftHidden(NamedTuple):
    """The base's hidden states at each head's target: what its whole distribution follows from.

    `others_PK`, `others_PKD`: runners-up in place of the last token of each head's path, and the
    hidden states there (train/features/runners_up.py).
    """

    hidden_PKD: Tensor
    others_PK: Tensor | None = None
    others_PKD: Tensor | None = None


@dataclass(frozen=True)
class LossOptions:
    """Which loss, and how it is computed; `kind` is one of chunked.LOSSES."""

    decay: float = 0.8
    chunk: int = 1024
    kind: str = "cross_entropy"
    soft_share: float = 0.0
    precision: str = "float32"  # of matrix products
    soft_top: int | None = None  # likeliest tokens in a soft target, where the recipe says

    @classmethod
    def of(cls, train: TrainSection) -> "LossOptions":
        share = train.soft_share or SOFT_SHARES[train.loss]
        top = None if train.soft_top == "all" else train.soft_top
        return cls(train.head_decay, train.chunk_positions, train.loss, share, train.precision, top)

    def products(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Inside, matrix products are computed in `precision`."""
        if self.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, getattr(torch, self.precision))


class HeadsLoss(NamedTuple):
    """The loss of one micro-batch, or summed over those of an update."""

    loss: Tensor  # scalar, with gradient
    per_head_K: Tensor  # unweighted mean loss of each head, detached
    missing_K: Tensor  # targets that the projection has no column for
    base: Tensor  # scalar, detached: the base's own loss in Medusa-2, else 0


def target_counts(heads: MedusaHeads, ahead_PJ: Tensor, soft: bool) -> Tensor:
    """counts_K (float): the number of positions with a target for each head.

    Without soft targets, targets outside the projection do not count.
    """
    targets_PK = ahead_PJ[:, 1:].to(heads.base.device, torch.int64)
    known_PK = targets_PK >= 0 if soft else heads.to_columns(targets_PK) >= 0
    return known_PK.sum(0).to(loss_dtype(heads))


def loss_dtype(heads: MedusaHeads) -> torch.dtype:
    """Losses are summed in float32 at least."""
    return torch.promote_types(head_parameter_dtype(heads), torch.float32)


def heads_loss(
    heads: MedusaHeads,
    hidden_PD: Tensor,
    ahead_PJ: Tensor,
    options: LossOptions,
    soft: SoftTargets | SoftHidden | None = None,
    counts_K: Tensor | None = None,
) -> HeadsLoss:
    """Sum over heads of decay^(k+1) (k from 0) times the head's summed loss / counts_K.

    counts_K: the update's, by default those of these positions; a head without any adds 0.
    ahead_PJ: ids of the root and of each head's target, -1 for none. The fraction `soft_share` of
    the target is `soft`, scaled to sum to 1 over the tokens with a column. With runners-up a head's
    loss is the mean of both paths'.
    """
    hidden_PD = hidden_PD.to(heads.base.device, head_parameter_dtype(heads))
    ahead_PJ = ahead_PJ.to(heads.base.device, torch.int64)
    if counts_K is None:
        counts_K = target_counts(heads, ahead_PJ, soft is not None)
    losses, missing = [], []
    for k, (z_PD, other_PD) in enumerate(_ends(heads, hidden_PD, ahead_PJ, soft)):
        shared = _shared_out(heads, ahead_PJ[:, k + 1], soft, options.soft_share, k)
        total = _of_head(heads, k, z_PD, shared, options)
        if other_PD is not None:
            others = _of_others(heads, ahead_PJ[:, k + 1], soft, k)
            total = (total + _of_head(heads, k, other_PD, others, options)) / 2
        losses.append(total / counts_K[k].clamp_min(1))
        missing.append(((shared.columns_PS[:, 0] < 0) & (ahead_PJ[:, k + 1] >= 0)).sum())
    per_head_K = torch.stack(losses)
    loss = _weighted(per_head_K, options.decay)
    return HeadsLoss(loss, per_head_K.detach(), torch.stack(missing), loss.detach() * 0)


def _ends(
    heads: MedusaHeads,
    hidden_PD: Tensor,
    ahead_PJ: Tensor,
    soft: SoftTargets | SoftHidden | None,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What each head makes of the text's path, and of the same with a runner-up at its end."""
    walk, others_PK = Walk(), soft.others_PK if isinstance(soft, SoftHidden) else None
    for k in range(heads.num_heads):
        before, other_PD = walk.copy(), None
        z_PD = heads.transform(hidden_PD, k, ahead_PJ, walk)
        if others_PK is not None:
            end_P1 = others_PK[:, k : k + 1].to(ahead_PJ)
            other_PJ = torch.cat([ahead_PJ[:, :k], end_P1, ahead_PJ[:, k + 1 :]], dim=1)
            other_PD = heads.transform(hidden_PD, k, other_PJ, before)
        yield z_PD, other_PD


def _of_head(
    heads: MedusaHeads, k: int, z_PD: Tensor, shared: SharedTargets, options: LossOptions
) -> Tensor:
    """The summed loss of head k."""
    weights = list(heads.projections[k].parameters()) if len(heads.projections) else []
    project = partial(project_rows, heads, k=k)
    return chunked_loss(z_PD, shared, project, options.chunk, options.kind, weights)


def _of_others(
    heads: MedusaHeads, targets_P: Tensor, soft: SoftTargets | SoftHidden | None, k: int
) -> SharedTargets:
    """The targets after runners-up: the base's distribution alone, since no text follows."""
    assert isinstance(soft, SoftHidden)
    assert soft.others_PKD is not None
    columns_P1, dtype = heads.to_columns(targets_P)[:, None], loss_dtype(heads)
    known_P = (targets_P >= 0).to(dtype)
    hidden_PD = soft.others_PKD[:, k].to(targets_P.device)
    return SharedTargets(columns_P1, torch.zeros_like(known_P)[:, None], None, hidden_PD, known_P)


def _weighted(per_head_K: Tensor, decay: float) -> Tensor:
    powers_K = torch.arange(1, len(per_head_K) + 1, device=per_head_K.device)
    base = torch.full((), decay, dtype=per_head_K.dtype, device=per_head_K.device)
    return (base**powers_K * per_head_K).sum()


def base_loss(
    base: BaseModel,
    hidden_PD: Tensor,
    roots_P: Tensor,
    options: LossOptions,
    count: Tensor,
    original: SoftTargets | None,
) -> Tensor:
    """The base's own loss at these positions, summed, over the update's `count` of them.

    Cross-entropy against the root, which is the token in the text, or in part (`soft_share`)
    against the original base's distribution: KL up to a constant, over its likeliest tokens and all
    others as one (arXiv 2401.10774, §2.3.2). `original` holds [P, S] here. roots_P: -1 for none.
    """
    roots_P = roots_P.to(hidden_PD.device, torch.int64)
    embedding = base.own_output
    weights = [weight for weight in embedding.parameters(recurse=False) if weight.requires_grad]
    dtype = torch.promote_types(hidden_PD.dtype, torch.float32)
    known_P = (roots_P >= 0).to(dtype)
    hard = 1 - options.soft_share if original is not None else 1.0
    columns_PS, shares_PS = roots_P[:, None], (hard * known_P)[:, None]
    rest_P = torch.zeros_like(known_P)
    if original is not None:
        chances_PS = original.probabilities_PKS.to(hidden_PD.device, dtype) * known_P[:, None]
        soft_PS = options.soft_share * chances_PS
        columns_PS = torch.cat([columns_PS, original.ids_PKS.to(hidden_PD.device).long()], 1)
        shares_PS = torch.cat([shares_PS, soft_PS], 1)
        rest_P = (options.soft_share * known_P - soft_PS.sum(1)).clamp_min(0)
    targets = SharedTargets(columns_PS, shares_PS, rest_P)
    total = chunked_loss(hidden_PD, targets, base.head_logits, options.chunk, "rest", weights)
    return total / count.clamp_min(1)


def _shared_out(
    heads: MedusaHeads,
    targets_P: Tensor,
    soft: SoftTargets | SoftHidden | None,
    soft_share: float,
    k: int,
) -> SharedTargets:
    """The columns that share each position's target, and their shares."""
    columns_P1 = heads.to_columns(targets_P)[:, None]
    dtype = loss_dtype(heads)
    if soft is None:
        return SharedTargets(columns_P1, (columns_P1 >= 0).to(dtype))
    if isinstance(soft, SoftHidden):
        hard_P1 = (1 - soft_share) * (columns_P1 >= 0).to(dtype)
        of_base_P = soft_share * (targets_P >= 0).to(dtype)
        hidden_PD = soft.hidden_PKD[:, k].to(targets_P.device)
        return SharedTargets(columns_P1, hard_P1, None, hidden_PD, of_base_P)
    ids_PS = soft.ids_PKS[:, k].to(targets_P.device, torch.int64)
    columns_PS = heads.to_columns(ids_PS)
    known_PS = (columns_PS >= 0) & (targets_P >= 0)[:, None]
    shares_PS = soft.probabilities_PKS[:, k].to(targets_P.device, dtype) * known_PS
    shares_PS = soft_share * shares_PS / shares_PS.sum(1, keepdim=True).clamp_min(1e-6)
    hard_P1 = (1 - soft_share) * (columns_P1 >= 0).to(dtype)
    return SharedTargets(torch.cat([columns_P1, columns_PS], 1), torch.cat([hard_P1, shares_PS], 1))
