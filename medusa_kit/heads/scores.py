"""The likeliest tokens of heads with their log-probabilities.

Shapes: K heads, R columns of the projection, B batch, D hidden, C guesses kept, X any leading
shape, J tokens of the path.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.draws import AMONG, OF_A_SUM, RowDraws, RowsDraws
from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.noise import gumbel_of, signed


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
    if drawn := _drawn(draws):
        rows, places = [row for row, _ in drawn], [(own, k) for k in numbers for _, own in drawn]
        found = _guessed_draws(heads, logits_KBR[:, rows].flatten(0, 1), places, count)
        ids_KBC[:, rows], scores_KBC[:, rows] = (
            part.unflatten(0, (len(numbers), len(rows))) for part in found
        )
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
    if drawn := _drawn(draws):
        rows, places = [row for row, _ in drawn], [(own, k) for _, own in drawn]
        ids_XC[rows], scores_XC[rows] = _guessed_draws(heads, logits_XR[rows], places, count)
    return ids_XC, scores_XC


def _drawn(draws: RowsDraws | None) -> list[tuple[int, RowDraws]]:
    """Rows whose tokens will be drawn, and how."""
    return [(row, own) for row, own in enumerate(draws or ()) if own is not None]


def _scored(
    heads: MedusaHeads, logits_XR: Tensor, count: int, temperature: Tensor | float
) -> tuple[Tensor, Tensor]:
    columns_XC = heads.best_columns(logits_XR, count)
    logits_XR = logits_XR.to(torch.promote_types(logits_XR.dtype, torch.float32)) / temperature
    scores_XC = logits_XR.gather(-1, columns_XC) - logits_XR.logsumexp(-1, keepdim=True)
    return heads.to_ids(columns_XC), scores_XC.clamp_max(0.0)


def _guessed_draws(
    heads: MedusaHeads, logits_XR: Tensor, draws_X: Sequence[tuple[RowDraws, int]], count: int
) -> tuple[Tensor, Tensor]:
    """(ids_XC, scores_XC): the tokens that the noise most likely picks, best first.

    `draws_X`: along X's first dimension, with the head that guesses.
    """
    device, dims = logits_XR.device, [1] * (logits_XR.dim() - 1)
    seeds = torch.tensor([signed(draws.place_seed(k)) for draws, k in draws_X]).view(-1, *dims)
    heat = torch.tensor([draws.heat for draws, _ in draws_X]).view(-1, *dims)
    ids_R = heads.to_ids(torch.arange(logits_XR.shape[-1], device=device))
    noise_XR = gumbel_of(seeds.to(device), ids_R)
    sums_XR = logits_XR.float() / heat.to(device) + noise_XR
    columns_XC = heads.best_columns(sums_XR, max(count, min(AMONG, heads.num_columns)))
    scores_XC = (OF_A_SUM * sums_XR.gather(-1, columns_XC)).log_softmax(-1)
    wide = torch.promote_types(logits_XR.dtype, torch.float32)  # as `_scored`
    return heads.to_ids(columns_XC)[..., :count], scores_XC[..., :count].to(wide)
