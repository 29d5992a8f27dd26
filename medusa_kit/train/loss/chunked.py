"""Losses over a vocabulary without a [positions, columns] tensor: value and gradient by chunks.

The loss of a chunk and its gradient are computed in the forward pass, so the largest tensor is
[chunk, columns] of one head; only the gradient with respect to z (and a trained projection's
weights) is kept for the backward pass. With p the target and q the prediction at one position:

cross_entropy  -Σ p log q; `soft` is the same with the base's own distribution in p
lk             -log of Σ min(p, q), the probability that sampling accepts q (LK losses, arXiv
               2602.23881); for a hard target it is cross_entropy
rest           cross_entropy in which the rest of p belongs to all other columns together

Shapes: P positions, D hidden, R columns, C positions of one chunk, S columns that share a target.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

TINY = 1e-12


class SharedTargets(NamedTuple):
    """Which columns share each position's target; the first is the token that was written.

    columns_PS: -1 for none, and there shares_PS is 0. rest_P: the share of all columns that are not
    among columns_PS[:, 1:]; only the loss `rest` reads it. hidden_PD: where the base's distribution
    over all columns has the share of_base_P; only cross_entropy reads it.
    """

    columns_PS: Tensor
    shares_PS: Tensor
    rest_P: Tensor | None = None
    hidden_PD: Tensor | None = None
    of_base_P: Tensor | None = None

    def chunk(self, rows: slice) -> "SharedTargets":
        return SharedTargets(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def of_base(self, project: Callable[[Tensor], Tensor]) -> Tensor | None:
        """shares_PR of the base's distribution."""
        if self.hidden_PD is None:
            return None
        assert self.of_base_P is not None
        with torch.no_grad():
            logits_PR = project(self.hidden_PD).to(self.of_base_P.dtype)
            return logits_PR.softmax(-1).mul_(self.of_base_P[:, None])


def chunked_loss(
    z_PD: Tensor,
    targets: SharedTargets,
    project: Callable[[Tensor], Tensor],
    chunk: int,
    kind: str,
    weights: Sequence[Tensor],
) -> Tensor:
    """The loss summed over positions. `project`: z_CD -> logits_CR; `weights`: its trained ones."""
    graded = torch.is_grad_enabled()
    return _ChunkedLoss.apply(z_PD, targets, project, chunk, kind, graded, *weights)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z_PD: Tensor,
        targets: SharedTargets,
        project: Callable[[Tensor], Tensor],
        chunk: int,
        kind: str,
        with_gradient: bool,
        *weights: Tensor,
    ) -> Tensor:
        total = targets.shares_PS.new_zeros(())
        gradient_PD = torch.empty_like(z_PD) if with_gradient else None
        weight_gradients = [torch.zeros_like(w) for w in weights] if with_gradient else []
        for start in range(0, len(z_PD), chunk):
            rows = slice(start, start + chunk)
            with torch.set_grad_enabled(with_gradient):
                z_CD = z_PD[rows].detach().requires_grad_(with_gradient)
                logits_CR = project(z_CD)
            of_chunk = targets.chunk(rows)
            if (shares_CR := of_chunk.of_base(project)) is not None:
                loss, gradient_CR = _cross_entropy(logits_CR.detach(), of_chunk, shares_CR)
            else:
                loss, gradient_CR = LOSSES[kind](logits_CR.detach(), of_chunk)
            total += loss
            if gradient_PD is not None:
                inputs = [z_CD, *weights]
                gradients = torch.autograd.grad(logits_CR, inputs, gradient_CR.to(logits_CR.dtype))
                gradient_PD[rows] = gradients[0]
                for kept, new in zip(weight_gradients, gradients[1:], strict=True):
                    kept += new
        if gradient_PD is not None:
            ctx.save_for_backward(gradient_PD, *weight_gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        scaled = (outer[0].to(saved.dtype) * saved for saved in ctx.saved_tensors)
        gradient_PD, *weight_gradients = scaled
        return gradient_PD, None, None, None, None, None, *weight_gradients


def _cross_entropy(
    logits_CR: Tensor, targets: SharedTargets, shares_CR: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(summed loss, its gradient_CR with respect to the logits), in the shares' dtype."""
    columns_CS, shares_CS, *_ = targets
    index_CS = columns_CS.clamp_min(0)
    log_chance_CR = logits_CR.to(shares_CS.dtype).log_softmax(-1)
    loss = -(log_chance_CR.gather(1, index_CS) * shares_CS).sum()
    all_C1 = shares_CS.sum(1, keepdim=True)
    if shares_CR is not None:
        loss = loss - torch.dot(log_chance_CR.flatten(), shares_CR.flatten())
        all_C1 = all_C1 + shares_CR.sum(1, keepdim=True)
    gradient_CR = log_chance_CR.exp_().mul_(all_C1)
    if shares_CR is not None:
        gradient_CR -= shares_CR
    return loss, gradient_CR.scatter_add_(1, index_CS, -shares_CS)


def _with_rest(logits_CR: Tensor, targets: SharedTargets) -> tuple[Tensor, Tensor]:
    columns_CS, shares_CS, rest_C, *_ = targets
    assert rest_C is not None
    index_CS = columns_CS.clamp_min(0)
    log_chance_CR = logits_CR.to(shares_CS.dtype).log_softmax(-1)
    loss = -(log_chance_CR.gather(1, index_CS) * shares_CS).sum()
    chance_CR = log_chance_CR.exp_()
    others_CR = chance_CR.scatter(1, index_CS[:, 1:], 0.0)
    outside_C = others_CR.sum(1).clamp_min(TINY)
    loss = loss - (rest_C * outside_C.log()).sum()
    gradient_CR = chance_CR.mul_((shares_CS.sum(1) + rest_C)[:, None])
    gradient_CR -= others_CR.mul_((rest_C / outside_C)[:, None])
    return loss, gradient_CR.scatter_add_(1, index_CS, -shares_CS)


def _likelihood_of_acceptance(logits_CR: Tensor, targets: SharedTargets) -> tuple[Tensor, Tensor]:
    index_CS, shares_CS = _merged(targets)
    chance_CR = logits_CR.to(shares_CS.dtype).softmax(-1)
    chance_CS = chance_CR.gather(1, index_CS)
    below_CS = (chance_CS < shares_CS).to(shares_CS.dtype)  # where a larger q increases the overlap
    overlap_C = torch.minimum(chance_CS, shares_CS).sum(1)
    risen_CS = chance_CS * below_CS
    gradient_CR = chance_CR.mul_(-risen_CS.sum(1, keepdim=True)).scatter_add_(1, index_CS, risen_CS)
    known_C = (shares_CS.sum(1) > 0).to(shares_CS.dtype)
    safe_C = overlap_C.clamp_min(TINY)
    return -(safe_C.log() * known_C).sum(), gradient_CR.mul_(-(known_C / safe_C)[:, None])


def _merged(targets: SharedTargets) -> tuple[Tensor, Tensor]:
    """(columns, shares) with the written token's share merged where it is among the others."""
    columns_CS, shares_CS, *_ = targets
    same_CS = (columns_CS[:, 1:] == columns_CS[:, :1]) & (columns_CS[:, :1] >= 0)
    hard_C1 = shares_CS[:, :1]
    moved_C1 = same_CS.any(1, keepdim=True)
    shares_CS = torch.cat([hard_C1 * ~moved_C1, shares_CS[:, 1:] + hard_C1 * same_CS], 1)
    return columns_CS.clamp_min(0), shares_CS


LOSSES = {
    "cross_entropy": _cross_entropy,
    "soft": _cross_entropy,
    "lk": _likelihood_of_acceptance,
    "rest": _with_rest,
}
