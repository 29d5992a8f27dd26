"""The likeliest tokens of heads with their log-probabilities.

Shapes: K heads, R columns of the projection, B batch, D hidden, C guesses kept, X any leading
shape, J tokens of the path.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.draws import AMONG, OF_A_SUM, Draws, RowsDraws
from medusa_kit.heads.kinds import MedusaHeads


def scored_guesses(
    heads: MedusaHeads,
    hidden_BD: Tensor,
    count: int,
    temperatures: Sequence[float],
    roots_B: Tensor | None = None,
    draws: RowsDraws | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids_KBC, scores_KBC) of the first heads, one for each temperature, in one pass.

    Guesses are in the order of `MedusaHeads.candidates`; scores are log-probabilities, <= 0.
    `draws`: of rows whose tokens will be drawn, which are guessed as heads/draws.py says.
    """
    path_BJ = None if roots_B is None else roots_B[:, None]
    numbers = range(len(temperatures))
    if draws is None:
        guesses = heads.quickly(numbers, hidden_BD, path_BJ, count, temperatures)
        if guesses is not None:
            return guesses
    logits_KBR = heads(hidden_BD, len(temperatures), roots_B)
    scale_K11 = torch.tensor(temperatures, device=logits_KBR.device)[:, None, None]
    ids_KBC, scores_KBC = _scored(heads, logits_KBR, count, scale_K11)
    for row, own in enumerate(draws or ()):
        if own is not None:
            for k in numbers:
                found = _guessed_draws(heads, logits_KBR[k, row], own, k, count)
                ids_KBC[k, row], scores_KBC[k, row] = found
    return ids_KBC, scores_KBC


def scored_guesses_after(
    heads: MedusaHeads,
    k: int,
    hidden_XD: Tensor,
    path_XJ: Tensor,
    count: int,
    temperature: float,
    walk: Walk | None = None,
    draws: RowsDraws | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids_XC, scores_XC) of head k after each path. With `draws` X begins with the rows."""
    if draws is None:
        guesses = heads.quickly([k], hidden_XD, path_XJ, count, [temperature])
        if guesses is not None:
            return guesses[0][0], guesses[1][0]
    logits_XR = heads.project(heads.transform(hidden_XD, k, path_XJ, walk), k)
    ids_XC, scores_XC = _scored(heads, logits_XR, count, temperature)
    for row, own in enumerate(draws or ()):
        if own is not None:
            ids_XC[row], scores_XC[row] = _guessed_draws(heads, logits_XR[row], own, k, count)
    return ids_XC, scores_XC


def _scored(
    heads: MedusaHeads, logits_XR: Tensor, count: int, temperature: Tensor | float
) -> tuple[Tensor, Tensor]:
    columns_XC = heads.best_columns(logits_XR, count)
    logits_XR = logits_XR.to(torch.promote_types(logits_XR.dtype, torch.float32)) / temperature
    scores_XC = logits_XR.gather(-1, columns_XC) - logits_XR.logsumexp(-1, keepdim=True)
    return heads.to_ids(columns_XC), scores_XC.clamp_max(0.0)


def _guessed_draws(
    heads: MedusaHeads, logits_XR: Tensor, draws: Draws, k: int, count: int
) -> tuple[Tensor, Tensor]:
    """(ids_XC, scores_XC): the tokens that the noise most likely picks, best first."""
    columns_R = torch.arange(logits_XR.shape[-1], device=logits_XR.device)
    sums_XR = draws.noised(logits_XR, heads.to_ids(columns_R), k)
    columns_XC = heads.best_columns(sums_XR, max(count, min(AMONG, heads.num_columns)))
    scores_XC = (OF_A_SUM * sums_XR.gather(-1, columns_XC)).log_softmax(-1)
    return heads.to_ids(columns_XC)[..., :count], scores_XC[..., :count]
