"""The draft tokens of heads for rows whose tokens are the likeliest, or will be drawn; and the
likeliest tokens with their log-probabilities.

Shapes: K heads, R columns of the projection, B batch, D hidden, C draft tokens kept, X any leading
shape, J tokens of the path.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.draws import AMONG, RowDraws, RowsDraws, noise_seeds
from medusa_kit.heads.kinds import MedusaHeads
from medusa_kit.heads.noise import gumbel_of
from medusa_kit.heads.order import best_columns
from medusa_kit.transfer import to_device


def guesses(
    heads: MedusaHeads,
    hidden_BD: Tensor,
    count: int,
    num_heads: int,
    draws: RowsDraws | None = None,
) -> Tensor:
    """ids_KBC of the first heads, best first, in one pass. `draws`: of rows whose tokens will be
    drawn, which are drafted as heads/draws.py says."""
    if draws is None:
        return heads.candidates(hidden_BD, count, num_heads)
    return scored_guesses(heads, hidden_BD, count, [1.0] * num_heads, draws)[0]


def guesses_after(
    heads: MedusaHeads,
    k: int,
    hidden_XD: Tensor,
    path_XJ: Tensor,
    count: int,
    walk: Walk | None = None,
    draws: RowsDraws | None = None,
) -> Tensor:
    """ids_XC of head k after each path, best first. With `draws` X begins with the rows."""
    if draws is None:
        return heads.candidates_after(k, hidden_XD, path_XJ, count, walk)
    return scored_guesses_after(heads, k, hidden_XD, path_XJ, count, 1.0, walk, draws)[0]


def scored_guesses(
    heads: MedusaHeads,
    hidden_BD: Tensor,
    count: int,
    temperatures: Sequence[float],
    draws: RowsDraws | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids_KBC, scores_KBC) of the first heads, one for each temperature, in one pass.

    Draft tokens are in the order of `MedusaHeads.candidates`; scores are log-probabilities, <= 0.
    `draws`: of rows whose tokens will be drawn, which are drafted as heads/draws.py says.
    """
    numbers = range(len(temperatures))
    if draws is None:
        guesses = heads.quickly(numbers, hidden_BD, None, count, temperatures)
        if guesses is not None:
            return guesses[0], _log_probabilities(guesses[1])
    logits_KBR = heads(hidden_BD, len(temperatures))
    scale_K11 = to_device(temperatures, logits_KBR.device, torch.float32)[:, None, None]
    ids_KBC, scores_KBC = _scored(heads, logits_KBR, count, scale_K11)
    if drawn := _drawn(draws):
        rows, own = [row for row, _ in drawn], [draws for _, draws in drawn]
        at = to_device(rows, logits_KBR.device)
        logits_XR = logits_KBR[:, at].flatten(0, 1)
        own_X = [temperature for temperature in temperatures for _ in own]
        found = _guessed_draws(heads, logits_XR, own, numbers, count, own_X)
        ids_KBC[:, at], scores_KBC[:, at] = (
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
            return guesses[0][0], _log_probabilities(guesses[1][0])
    logits_XR = heads.project(heads.transform(hidden_XD, k, path_XJ, walk), k)
    ids_XC, scores_XC = _scored(heads, logits_XR, count, temperature)
    if drawn := _drawn(draws):
        rows, own = [row for row, _ in drawn], [draws for _, draws in drawn]
        own_X = [temperature] * len(rows)
        at = to_device(rows, logits_XR.device)
        found = _guessed_draws(heads, logits_XR[at], own, [k], count, own_X)
        ids_XC[at], scores_XC[at] = found
    return ids_XC, scores_XC


def _drawn(draws: RowsDraws | None) -> list[tuple[int, RowDraws]]:
    """Rows whose tokens will be drawn, and how."""
    return [(row, own) for row, own in enumerate(draws or ()) if own is not None]


def _scored(
    heads: MedusaHeads, logits_XR: Tensor, count: int, temperature: Tensor | float
) -> tuple[Tensor, Tensor]:
    columns_XC = best_columns(logits_XR, count)
    logits_XR = logits_XR.to(torch.promote_types(logits_XR.dtype, torch.float32)) / temperature
    scores_XC = logits_XR.gather(-1, columns_XC) - logits_XR.logsumexp(-1, keepdim=True)
    return heads.to_ids(columns_XC), _log_probabilities(scores_XC)


def _log_probabilities(scores: Tensor) -> Tensor:
    """Scores that are not numbers, of heads that overflow, stand for what has no chance."""
    return scores.clamp_max(0.0).masked_fill(scores.isnan(), -math.inf)


def _guessed_draws(
    heads: MedusaHeads,
    logits_XR: Tensor,
    draws_B: Sequence[RowDraws],
    numbers: Sequence[int],
    count: int,
    temperatures_X: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """(ids_XC, scores_XC): the tokens that the noise most likely picks, best first, with their
    chances as heads/draws.py has them.

    X's first dimension has the rows of each head, one head (`numbers`) after the other;
    `temperatures_X`: the heads' own there. Beyond the AMONG best noise is not counted, only that it
    lifts none above the last of them.
    """
    device, dims = logits_XR.device, [1] * (logits_XR.dim() - 1)
    seeds = torch.from_numpy(noise_seeds(draws_B, numbers).view(np.int64))
    seeds_XR = to_device(seeds, device).view(-1, *dims)
    heat = [draws.heat for draws in draws_B] * len(numbers)
    heat_XR = to_device(heat, device, torch.float32).view(-1, *dims)
    own_XR = to_device(list(temperatures_X), device, torch.float32).view(-1, *dims)
    ids_R = heads.to_ids(torch.arange(logits_XR.shape[-1], device=device))
    wide = torch.promote_types(logits_XR.dtype, torch.float32)  # as `_scored`
    logits_XR = logits_XR.float()
    sums_XR = logits_XR / heat_XR + gumbel_of(seeds_XR, ids_R)
    columns_XC = best_columns(sums_XR, max(count, min(AMONG, heads.num_columns)))
    best_XC = sums_XR.gather(-1, columns_XC) * (heat_XR / own_XR)
    others_XR = (logits_XR / own_XR).minimum(best_XC[..., -1:]).scatter(-1, columns_XC, -math.inf)
    whole_X1 = torch.cat([best_XC, others_XR], dim=-1).logsumexp(-1, keepdim=True)
    ids_XC, scores_XC = heads.to_ids(columns_XC), _log_probabilities(best_XC - whole_X1)
    return ids_XC[..., :count], scores_XC[..., :count].to(wide)
