"""The heads' loss (Medusa, arXiv 2401.10774, §2.2.1), without a [positions, columns] tensor.

Head k, from 1, weighs decay^k. Cross-entropy and its gradient are worked out chunk by chunk in the
forward pass, so the largest block is [chunk, columns] of one head; only the gradient with respect
to z (and an own projection's weights) is kept for the backward pass.

A target is one token, or in part (`soft_share`) the base's own distribution at that place, its
likeliest tokens (self-distillation, as Hydra++ does it: arXiv 2402.05109, §4).

Shapes: P positions, D hidden, K heads, J = K + 1 tokens ahead, R columns of the projection,
C positions of one chunk, S likeliest tokens of the base, or tokens that share one target.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.ranks import head_parameter_dtype, project_rows


class SoftTargets(NamedTuple):
    """Where each head's target stands: the base's likeliest tokens and their probabilities."""

    ids_PKS: Tensor
    probabilities_PKS: Tensor


class HeadsLoss(NamedTuple):
    loss: Tensor  # scalar, with gradient
    per_head_K: Tensor  # unweighted mean cross-entropy of each head, detached, nats
    missing_K: Tensor  # targets that the projection has no column for, left out


def heads_loss(
    heads: MedusaHeads,
    hidden_PD: Tensor,
    ahead_PJ: Tensor,
    decay: float,
    chunk: int,
    soft: SoftTargets | None = None,
    soft_share: float = 0.0,
) -> HeadsLoss:
    """Sum over heads of decay^(k+1) (k from 0) times the head's mean cross-entropy.

    The mean is over the positions where that head has a target with a column in the projection; a
    head without any adds 0. ahead_PJ: ids of the root and of each head's target, -1 for none.
    `soft_share` of the loss is against `soft`, scaled to sum to 1 over the tokens with a column.
    """
    hidden_PD = hidden_PD.to(heads.base.device, head_parameter_dtype(heads))
    ahead_PJ = ahead_PJ.to(heads.base.device, torch.int64)
    losses, missing = [], []
    for k in range(heads.num_heads):
        targets_P = ahead_PJ[:, k + 1]
        columns_PS, shares_PS = _shared_out(heads, targets_P, soft, soft_share, k)
        weights = list(heads.projections[k].parameters()) if len(heads.projections) else []
        z_PD = heads.transform(hidden_PD, k, ahead_PJ)
        total = _ChunkedCrossEntropy.apply(
            z_PD, columns_PS, shares_PS, heads, k, chunk, torch.is_grad_enabled(), *weights
        )
        losses.append(total / (shares_PS.sum(1) > 0).sum().clamp_min(1))
        missing.append(((columns_PS[:, 0] < 0) & (targets_P >= 0)).sum())
    per_head_K = torch.stack(losses)
    powers_K = torch.arange(1, heads.num_heads + 1, device=per_head_K.device)
    weights_K = torch.tensor(decay, dtype=per_head_K.dtype, device=per_head_K.device) ** powers_K
    return HeadsLoss((weights_K * per_head_K).sum(), per_head_K.detach(), torch.stack(missing))


class LossModule(nn.Module):
    """Heads whose forward is their loss: the shape of module that training engines drive."""

    def __init__(
        self, heads: MedusaHeads, decay: float, chunk: int, soft_share: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.decay = decay
        self.chunk = chunk
        self.soft_share = soft_share

    def forward(self, hidden_PD: Tensor, ahead_PJ: Tensor, *soft: Tensor) -> HeadsLoss:
        """`soft`: the two tensors of SoftTargets, or nothing."""
        targets = SoftTargets(*soft) if soft else None
        share = self.soft_share if soft else 0.0
        return heads_loss(self.heads, hidden_PD, ahead_PJ, self.decay, self.chunk, targets, share)


def _shared_out(
    heads: MedusaHeads, targets_P: Tensor, soft: SoftTargets | None, soft_share: float, k: int
) -> tuple[Tensor, Tensor]:
    """(columns_PS, shares_PS): which columns share each position's target; -1 and 0 for none."""
    columns_P1 = heads.to_columns(targets_P)[:, None]
    dtype = head_parameter_dtype(heads)
    if soft is None:
        return columns_P1, (columns_P1 >= 0).to(dtype)
    ids_PS = soft.ids_PKS[:, k].to(targets_P.device, torch.int64)
    columns_PS = heads.to_columns(ids_PS)
    known_PS = (columns_PS >= 0) & (targets_P >= 0)[:, None]
    shares_PS = soft.probabilities_PKS[:, k].to(targets_P.device, dtype) * known_PS
    shares_PS = soft_share * shares_PS / shares_PS.sum(1, keepdim=True).clamp_min(1e-6)
    hard_P1 = (1 - soft_share) * (columns_P1 >= 0).to(dtype)
    return torch.cat([columns_P1, columns_PS], 1), torch.cat([hard_P1, shares_PS], 1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of one head; columns_PS share each position's target by shares_PS."""

    @staticmethod
    def forward(
        ctx: Any,
        z_PD: Tensor,
        columns_PS: Tensor,
        shares_PS: Tensor,
        heads: MedusaHeads,
        k: int,
        chunk: int,
        with_gradient: bool,
        *weights: Tensor,
    ) -> Tensor:
        total = z_PD.new_zeros(())
        gradient_PD = torch.empty_like(z_PD) if with_gradient else None
        weight_gradients = [torch.zeros_like(w) for w in weights] if with_gradient else []
        for start in range(0, len(z_PD), chunk):
            rows = slice(start, start + chunk)
            with torch.set_grad_enabled(with_gradient):
                z_CD = z_PD[rows].detach().requires_grad_(with_gradient)
                logits_CR = project_rows(heads, z_CD, k)
            loss, gradient_CR = _cross_entropy(
                logits_CR.detach(), columns_PS[rows], shares_PS[rows]
            )
            total += loss
            if gradient_PD is not None:
                inputs = [z_CD, *weights]
                found = torch.autograd.grad(logits_CR, inputs, gradient_CR.to(logits_CR.dtype))
                gradient_PD[rows] = found[0]
                for kept, new in zip(weight_gradients, found[1:], strict=True):
                    kept += new
        if gradient_PD is not None:
            ctx.save_for_backward(gradient_PD, *weight_gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        gradient_PD, *weight_gradients = (outer[0] * saved for saved in ctx.saved_tensors)
        return gradient_PD, None, None, None, None, None, None, *weight_gradients


def _cross_entropy(
    logits_CR: Tensor, columns_CS: Tensor, shares_CS: Tensor
) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy, its gradient_CR with respect to the logits), in the shares' dtype."""
    index_CS = columns_CS.clamp_min(0)
    log_probability_CR = logits_CR.to(shares_CS.dtype).log_softmax(-1)
    loss = -(log_probability_CR.gather(1, index_CS) * shares_CS).sum()
    gradient_CR = log_probability_CR.exp_().mul_(shares_CS.sum(1, keepdim=True))
    return loss, gradient_CR.scatter_add_(1, index_CS, -shares_CS)
