"""Temperature calibration of heads: one number for each head, by maximum likelihood.

Heads used on other text than they were trained on are over- or underconfident, each to its own
degree. Dividing a head's logits by the temperature with the highest likelihood of the true tokens
corrects this ("On Calibration of Modern Neural Networks", arXiv 1706.04599, §4.2) and makes the
probabilities of different heads comparable, which a dynamic tree needs.

Shapes: P positions, D hidden, K heads, J = K + 1 tokens ahead, R columns of the projection, C
positions of one chunk, G temperatures tried.
"""

import torch
from torch import Tensor

from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.ranks import head_parameter_dtype, project_rows

TRIED_G = 2.0 ** torch.linspace(-1.5, 1.5, 13, dtype=torch.float64)


@torch.no_grad()
def fit_temperatures(
    heads: MedusaHeads, hidden_PD: Tensor, ahead_PJ: Tensor, chunk_positions: int = 512
) -> tuple[float, ...]:
    """The temperature of each head with the least mean loss at these positions, about 1/3 to 3.

    ahead_PJ: as for `token_ranks`. Tokens outside the projection say nothing about its scale and
    are left out; a head without any position keeps 1.0. Losses are computed at TRIED_G; the minimum
    is that of the parabola through the lowest three.
    """
    losses_KG = torch.zeros(heads.num_heads, len(TRIED_G), dtype=torch.float64)
    dtype = head_parameter_dtype(heads)
    for start in range(0, len(hidden_PD), chunk_positions):
        rows = slice(start, start + chunk_positions)
        hidden_CD = hidden_PD[rows].to(heads.base.device, dtype)
        ahead_CJ = ahead_PJ[rows].to(heads.base.device, torch.int64)
        for k, z_CD in enumerate(heads.transforms(hidden_CD, ahead_CJ)):
            columns_C = heads.to_columns(ahead_CJ[:, k + 1])
            known_C = columns_C >= 0
            if known_C.any():
                logits_CR = project_rows(heads, z_CD[known_C], k)
                losses_KG[k] += _losses(logits_CR, columns_C[known_C])
    return tuple(_minimum(losses_G) for losses_G in losses_KG)


def _losses(logits_CR: Tensor, columns_C: Tensor) -> Tensor:
    """Sum of the losses at each temperature, [G], float64 on the CPU. Positions whose logits are no
    numbers are left out of all."""
    logits_CR = logits_CR.float()
    true_C = logits_CR.gather(1, columns_C[:, None])[:, 0]
    losses = [((logits_CR / t).logsumexp(1) - true_C / t).double() for t in TRIED_G.tolist()]
    losses_GC = torch.stack(losses)
    return losses_GC.where(losses_GC.isfinite().all(0), 0.0).sum(1).cpu()


def _minimum(losses_G: Tensor) -> float:
    """The temperature of least loss; losses are smooth in log(temperature), with even steps."""
    if not losses_G.any():
        return 1.0
    index = int(losses_G.argmin())
    if index in (0, len(TRIED_G) - 1):
        return float(TRIED_G[index])
    before, lowest, after = losses_G[index - 1 : index + 2].tolist()
    shift = 0.5 * (before - after) / (before - 2 * lowest + after)
    return float(TRIED_G[index] * (TRIED_G[1] / TRIED_G[0]) ** shift)
