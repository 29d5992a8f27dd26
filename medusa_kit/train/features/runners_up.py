"""Runners-up: in place of each token of a text another one that the base thinks likely there, and
the hidden state that the base has at it.

Heads that read the path learn from it what follows a path that ends otherwise than the text does
(Hydra++, arXiv 2402.05109, trains on the text's paths alone). So a text teaches more, for a second
forward of the base over as many tokens: each runner-up sees what comes before it and itself.

Shapes: B batch, T tokens, D hidden, P positions, S likeliest tokens of the base.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medusa_kit.base.model import RELATIVE_TOLERANCE, BaseModel
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.train.features.rows import HeadTargets, Rows
from medusa_kit.train.features.top_tokens import top_tokens

AMONG = 4  # likeliest tokens, beside the text's own, of which one is drawn by its probability


class WithRunnersUp(NamedTuple):
    """Hidden states of positions: at their own tokens, and at what stands in their place."""

    hidden_PD: Tensor
    others_P1: Tensor  # int32 ids; the text's own where it begins
    others_PD: Tensor


@torch.no_grad()
def read_with_runners_up(base: BaseModel, group: Sequence[HeadTargets]) -> WithRunnersUp:
    """The positions of one batch of rows. What is drawn follows from a row's tokens alone, but for
    chances that are near ties in the base's dtype, which other rows beside it may round otherwise.
    """
    rows, cache = Rows.of(group, base.device, packing=False), _new_cache()
    hidden_BTD = _read(base, rows, cache)
    others_BT = _draw(base, group, rows, hidden_BTD)
    others_BTD = _read_instead(base, others_BT, cache)
    return WithRunnersUp(
        hidden_BTD.flatten(0, 1)[rows.flat_P],
        others_BT.flatten()[rows.flat_P, None].int(),
        others_BTD.flatten(0, 1)[rows.flat_P],
    )


@torch.no_grad()
def check_runners_up(base: BaseModel, items: Sequence[HeadTargets]) -> None:
    """Every other token of the longest row, read as runners-up are while others stand between them,
    must have its own hidden state.

    Raises IncompatibleBaseError where one has not, as with layers that read the text otherwise than
    by attention, or attention that takes no mask.
    """
    longest = max(items, key=lambda item: len(item.input_ids))
    rows, cache = Rows.of([longest], base.device, packing=False), _new_cache()
    hint = "use train.runners_up=false"
    try:
        hidden_BTD = _read(base, rows, cache)
        again_BTD = _read_instead(base, _every_other_replaced(base, rows.input_ids_BT), cache)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise IncompatibleBaseError(
            f"{base.info.model_type}: runners-up need a model of torch whose layers take "
            f"transformers' usual cache and masks; this one does not ({error})",
            hint=f"{hint}; load_base_model loads a base as a model of torch",
        ) from error
    first = (hidden_BTD.shape[1] - 1) % 2  # the last token is among those compared
    wide = hidden_BTD[0, first::2].float()
    apart_TD = again_BTD[0, first::2].float() - wide
    distance = float(apart_TD.square().mean(-1).sqrt().max() / wide.std().clamp_min(1e-12))
    allowed = RELATIVE_TOLERANCE[hidden_BTD.dtype]
    if not distance <= allowed:
        raise IncompatibleBaseError(
            f"{base.info.model_type}: a hidden state of a row of {len(longest.input_ids)} tokens "
            f"differs by {distance:.1e} of the spread where its token is read as a runner-up "
            f"(allowed {allowed:.0e})",
            hint=f"{hint}, or shorter rows (data.max_length) if attention has windows",
        )


def _every_other_replaced(base: BaseModel, ids_BT: Tensor) -> Tensor:
    """Tokens in which all but the last one, the third last and so on are replaced."""
    others_BT, first = ids_BT.clone(), ids_BT.shape[1] % 2
    others_BT[:, first::2] = (ids_BT[:, first::2] + 1) % base.info.vocab_size
    return others_BT


def _new_cache() -> object:
    from transformers import DynamicCache

    return DynamicCache()


def _read(base: BaseModel, rows: Rows, cache: object) -> Tensor:
    return base.traced_hidden_states(
        rows.input_ids_BT, rows.mask_BT, past_key_values=cache, use_cache=True
    )


def _read_instead(base: BaseModel, others_BT: Tensor, cache: object) -> Tensor:
    """hidden_BTD of these tokens, each in place of the one that `cache` holds there."""
    B, T = others_BT.shape
    positions_BT = torch.arange(T, device=others_BT.device).expand(B, -1)
    return base.traced_hidden_states(
        others_BT,
        position_ids_BT=positions_BT,
        attention_mask=_masks(base, B, T),
        past_key_values=cache,
        use_cache=True,
    )


def _masks(base: BaseModel, num_rows: int, length: int) -> Tensor | dict[str, Tensor]:
    """What is added to attention's scores: one mask for all layers, or one for each kind of layer
    where the rows are longer than the windows of some."""
    config = base.model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or window >= length:
        return _mask(base, num_rows, length, length)
    if not kinds:
        return _mask(base, num_rows, length, window)
    sizes = {kind: window if kind == "sliding_attention" else length for kind in set(kinds)}
    return {kind: _mask(base, num_rows, length, size) for kind, size in sizes.items()}


def _mask(base: BaseModel, num_rows: int, length: int, window: int) -> Tensor:
    """The mask over the text's tokens, then these: each of these sees itself and the text before
    it, at most `window` tokens in all."""
    at_T = torch.arange(length, device=base.device)
    behind_TT = at_T[:, None] - at_T  # how far each token of the text lies behind each of these
    before_TT = (behind_TT > 0) & (behind_TT < window)
    unseen = ~torch.cat([before_TT, behind_TT == 0], dim=1)
    mask = torch.zeros(unseen.shape, dtype=base.dtype, device=base.device)
    return mask.masked_fill_(unseen, float("-inf")).expand(num_rows, 1, -1, -1)


def _draw(base: BaseModel, group: Sequence[HeadTargets], rows: Rows, hidden_BTD: Tensor) -> Tensor:
    """tokens_BT: at each position one of the others that the base finds likeliest there."""
    own_X, others_X = rows.input_ids_BT.flatten(), rows.input_ids_BT.flatten().clone()
    first_P = rows.flat_P % rows.input_ids_BT.shape[1] == 0  # nothing comes before
    drawn_P = rows.flat_P[~first_P]
    before_PD = hidden_BTD.flatten(0, 1)[drawn_P - 1]
    ids_PS, chances_PS = top_tokens(base, before_PD, min(AMONG + 1, base.info.vocab_size))
    other_PS = ids_PS != own_X[drawn_P, None]
    kept_PS = other_PS & (other_PS.cumsum(-1) <= AMONG)
    shares_PS = (chances_PS.double() * kept_PS).cumsum(-1)
    uniform_P = _uniform(group).to(base.device)[~first_P]
    below_PS = shares_PS <= (uniform_P * shares_PS[:, -1])[:, None]
    drawn_P1 = below_PS.sum(-1, keepdim=True).clamp_max(ids_PS.shape[1] - 1)
    others_X[drawn_P] = ids_PS.gather(-1, drawn_P1)[:, 0].long()
    return others_X.view_as(rows.input_ids_BT)


def _uniform(group: Sequence[HeadTargets]) -> Tensor:
    """A number from 0 to below 1 for each position, the same for the same row."""
    numbers = []
    for item in group:
        seed = zlib.crc32(np.asarray(item.input_ids, dtype=np.int32).tobytes())
        of_tokens = np.random.default_rng(seed).random(len(item.input_ids))
        numbers.append(torch.from_numpy(of_tokens[item.positions_P]))
    return torch.cat(numbers)
