"""Tree attention, registered with transformers under the name `medusa_tree`.

The step attached to a module says which backend computes it (`choice.py`): `flash`, `triton` or
`sdpa`, the reference, which the others equal up to rounding.
Outside a tree step (training, calibration, plain forwards) it is transformers' own SDPA attention
with its own masks. Older classes (Falcon, GPT-J, CodeGen) that do not use the attention interface
keep their own attention and are passed the tree's mask instead.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.families import masks_itself
from medusa_kit.base.own_code import attention_of
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.attention.backend import AttentionCall
from medusa_kit.infer.attention.sdpa import explicit, tree_sdpa
from medusa_kit.infer.attention.step import (
    HOLDER_ATTRIBUTE,
    Chunk,
    StepHolder,
    Window,
    attach_holder,
    current_step,
)
from medusa_kit.infer.attention.temperature import scaled_by_position

ATTENTION_NAME = "medusa_tree"
STOCK = "sdpa"
MASKED = (STOCK, "eager")  # stock attention that follows its mask
# The modelling files of families with sliding windows import this.
WINDOWED = "create_sliding_window_causal_mask"


def medusa_tree(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, heads, T, head dim] in, [B, T, heads, ·] out."""
    step = current_step(module)
    sinks = kwargs.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if step is None and (softcap is not None or sinks is not None):  # SDPA has neither
        if attention_mask is None:
            T, L = query.shape[2], key.shape[2]
            attention_mask = query.new_ones(1, 1, T, L, dtype=torch.bool).tril(L - T)
        out = explicit(query, key, value, attention_mask, scale, softcap, sinks)
        return out.transpose(1, 2).contiguous(), None
    if step is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    window: Window = _chunk_of_config(module)
    if window is None:
        given = "sliding_window" in kwargs
        window = kwargs["sliding_window"] if given else _window_of_config(module)
    attend = step.attend or tree_sdpa
    query = scaled_by_position(module, query, step)
    if step.at_N is not None:
        query = step.padded(query)
    call = AttentionCall(query, key, value, step, scale, window, softcap, sinks)
    return step.unpadded(attend(call)), None


def _window_of_config(module: Any) -> int | None:
    """The window of a layer whose family applies it in the mask only (Qwen2-MoE, Phi-3.5-MoE)."""
    if not hasattr(sys.modules.get(type(module).__module__), WINDOWED):
        return None  # a window in the config of such a family means nothing
    kinds = getattr(module.config, "layer_types", None)
    slides = kinds is None or kinds[module.layer_idx] == "sliding_attention"
    return (getattr(module.config, "sliding_window", None) or None) if slides else None


def _chunk_of_config(module: Any) -> Chunk | None:
    """The chunk of a layer that attends in chunks (Llama 4)."""
    size = getattr(module.config, "attention_chunk_size", None)
    if size is None or module.config.layer_types[module.layer_idx] != "chunked_attention":
        return None
    return Chunk(size)


def install_tree_attention(model: Any) -> StepHolder:
    """Switch `model` to tree attention; returns the holder that a forward puts its step in.

    A class that does not use the attention interface, or adds to the mask before it, keeps its own
    and gets the mask. Raises IncompatibleBaseError where that attention takes no mask (flash).
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    AttentionInterface.register(ATTENTION_NAME, medusa_tree)
    # Without a mask function of the same name transformers would drop padding silently.
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    try:
        model.set_attn_implementation(ATTENTION_NAME)
    except ValueError as error:
        raise _not_switchable(model) from error
    if masks_itself(model.config):
        model.set_attn_implementation(STOCK)
    holder = attach_holder(model)
    if before != ATTENTION_NAME:
        holder.switched_from = before
    if model.config._attn_implementation != ATTENTION_NAME:
        if model.config._attn_implementation not in MASKED:
            raise _not_switchable(model)
        holder.mask_form = model.config._attn_implementation
    return holder


@contextmanager
def with_replaced_attention(model: Any) -> Iterator[None]:
    """A context in which the model computes with its own attention, where other code has taken the
    place of transformers' function for it."""
    holder, now = getattr(model, HOLDER_ATTRIBUTE, None), model.config._attn_implementation
    if holder is None or now != ATTENTION_NAME or attention_of(holder.switched_from) is None:
        yield
        return
    model.set_attn_implementation(holder.switched_from)
    try:
        yield
    finally:
        model.set_attn_implementation(now)


def _not_switchable(model: Any) -> IncompatibleBaseError:
    return IncompatibleBaseError(
        f"{type(model).__name__} does not let its attention be replaced, so trees cannot be "
        "verified on it",
        hint="transformers' own generate still works on this model; medusa-kit needs one that uses "
        "transformers' attention interface, or one loaded with attn_implementation='eager'",
    )
