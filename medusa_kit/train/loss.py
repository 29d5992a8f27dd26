"""The heads' loss (Medusa, arXiv 2401.10774, §2.2.1), without a [positions, columns] tensor.

Head k, from 1, weighs decay^k. Cross-entropy and its gradient are worked out chunk by chunk in the
forward pass, so the largest block is [chunk, columns] of one head; only the gradient with respect
to z (and an own projection's weights) is kept for the backward pass.

Shapes: P positions, D hidden, K heads, R columns of the projection, C positions of one chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.ranks import head_parameter_dtype, project_rows


class HeadsLoss(NamedTuple):
    loss: Tensor  # scalar, with gradient
    per_head_K: Tensor  # unweighted mean cross-entropy of each head, detached, nats
    missing_K: Tensor  # targets that the projection has no column for, left out


def heads_loss(
    heads: MedusaHeads, hidden_PD: Tensor, targets_PK: Tensor, decay: float, chunk: int
) -> HeadsLoss:
    """Sum over heads of decay^(k+1) (k from 0) times the head's mean cross-entropy.

    The mean is over the positions where that head has a target (targets_PK: token ids, -1 for
    none) with a column in the projection; a head without any adds 0.
    """
    hidden_PD = hidden_PD.to(heads.base.device, head_parameter_dtype(heads))
    targets_PK = targets_PK.to(heads.base.device, torch.int64)
    losses, missing = [], []
    for k in range(heads.num_heads):
        columns_P = heads.to_columns(targets_PK[:, k])
        weights = list(heads.projections[k].parameters()) if len(heads.projections) else []
        z_PD = heads.transform(hidden_PD, k)
        total = _ChunkedCrossEntropy.apply(
            z_PD, columns_P, heads, k, chunk, torch.is_grad_enabled(), *weights
        )
        losses.append(total / (columns_P >= 0).sum().clamp_min(1))
        missing.append(((columns_P < 0) & (targets_PK[:, k] >= 0)).sum())
    per_head_K = torch.stack(losses)
    powers_K = torch.arange(1, heads.num_heads + 1, device=per_head_K.device)
    weights_K = torch.tensor(decay, dtype=per_head_K.dtype, device=per_head_K.device) ** powers_K
    return HeadsLoss((weights_K * per_head_K).sum(), per_head_K.detach(), torch.stack(missing))


class LossModule(nn.Module):
    """Heads whose forward is their loss: the shape of module that training engines drive."""

    def __init__(self, heads: MedusaHeads, decay: float, chunk: int) -> None:
        super().__init__()
        self.heads = heads
        self.decay = decay
        self.chunk = chunk

    def forward(self, hidden_PD: Tensor, targets_PK: Tensor) -> HeadsLoss:
        return heads_loss(self.heads, hidden_PD, targets_PK, self.decay, self.chunk)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of one head over the positions with a column (column -1: none)."""

    @staticmethod
    def forward(
        ctx: Any,
        z_PD: Tensor,
        columns_P: Tensor,
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
            loss, gradient_CR = _cross_entropy(logits_CR.detach(), columns_P[rows], z_PD.dtype)
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
        return gradient_PD, None, None, None, None, None, *weight_gradients


def _cross_entropy(
    logits_CR: Tensor, columns_C: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy, its gradient_CR with respect to the logits), in `dtype`."""
    valid_C1 = (columns_C >= 0)[:, None]
    index_C1 = columns_C.clamp_min(0)[:, None]
    log_probability_CR = logits_CR.to(dtype).log_softmax(-1)
    loss = -(log_probability_CR.gather(1, index_C1) * valid_C1).sum()
    gradient_CR = log_probability_CR.exp_()
    gradient_CR.scatter_add_(1, index_C1, -valid_C1.to(dtype))
    return loss, gradient_CR.mul_(valid_C1)
