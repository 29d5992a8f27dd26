"""The likeliest tokens of heads with their log-probabilities.

Shapes: K heads, R columns of the projection, B batch, D hidden, C guesses kept, X any leading
shape, J tokens of the path.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.kinds import MedusaHeads


def scored_guesses(
    heads: MedusaHeads,
    hidden_BD: Tensor,
    count: int,
    temperatures: Sequence[float],
    roots_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids_KBC, scores_KBC) of the first heads, one for each temperature, in one pass.

    Guesses are in the order of `MedusaHeads.candidates`; scores are log-probabilities, <= 0.
    """
    path_BJ = None if roots_B is None else roots_B[:, None]
    numbers = range(len(temperatures))
    guesses = heads.quickly(numbers, hidden_BD, path_BJ, count, temperatures)
    if guesses is not None:
        return guesses
    logits_KBR = heads(hidden_BD, len(temperatures), roots_B)
    scale_K11 = torch.tensor(temperatures, device=logits_KBR.device)[:, None, None]
    return _scored(heads, logits_KBR, count, scale_K11)


def scored_guesses_after(
    heads: MedusaHeads,
    k: int,
    hidden_XD: Tensor,
    path_XJ: Tensor,
    count: int,
    temperature: float,
    walk: Walk | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids_XC, scores_XC) of head k after each path."""
    guesses = heads.quickly([k], hidden_XD, path_XJ, count, [temperature])
    if guesses is not None:
        return guesses[0][0], guesses[1][0]
    logits_XR = heads.project(heads.transform(hidden_XD, k, path_XJ, walk), k)
    return _scored(heads, logits_XR, count, temperature)


def _scored(
    heads: MedusaHeads, logits_XR: Tensor, count: int, temperature: Tensor | float
) -> tuple[Tensor, Tensor]:
    columns_XC = heads.best_columns(logits_XR, count)
    logits_XR = logits_XR.to(torch.promote_types(logits_XR.dtype, torch.float32)) / temperature
    scores_XC = logits_XR.gather(-1, columns_XC) - logits_XR.logsumexp(-1, keepdim=True)
    return heads.to_ids(columns_XC), scores_XC.clamp_max(0.0)
