"""The checks of a call of transformers' generate(): what the kit cannot honour is refused by name.

generation_settings.py says how each setting is treated.

Shapes: B batch, T tokens of the padded prompts.
"""

from typing import Any

import torch
from torch import Tensor

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.accept.generation_settings import expected, unavailable

# Keywords that generate() itself adds to every call; caches of models without attention have a name
# of their own.
CACHES = ("past_key_values", "cache_params")
OWN_KEYWORDS = {"attention_mask", "position_ids", *CACHES, "use_cache", "logits_to_keep"}


def check_request(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    keywords: dict[str, Any],
) -> None:
    """Raises ConfigError for what the kit cannot honour."""
    if config is None or not hasattr(config, "_eos_token_tensor"):
        raise ConfigError(
            "custom_generate was called without a prepared request",
            hint="call model.generate(**inputs, custom_generate=medusa_kit.custom_generate)",
        )
    if len(input_ids) == 0:
        raise ConfigError("there are no prompts in input_ids", hint="give one or more")
    if model.training:
        raise ConfigError("the model is in training mode", hint="call model.eval() first")
    if (setting := unavailable(config)) is not None:
        raise _refusal(f"{setting[0]}={setting[1]!r}", expected(setting[0]))
    _check_keywords(input_ids, keywords)
    T = input_ids.shape[1]
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=T,
        encoder_input_ids=input_ids,
        device=input_ids.device,
        model_kwargs=keywords,
    )
    _check_same("logits processor", logits_processor, processors)
    criteria = model._get_stopping_criteria(generation_config=config, stopping_criteria=[])
    _check_same("stopping criterion", stopping_criteria, criteria)


def unpadded(input_ids_BT: Tensor, mask_BT: Tensor | None) -> list[list[int]]:
    """The prompts without the padding on their left. Raises ConfigError for any other."""
    if mask_BT is None:
        return input_ids_BT.tolist()
    prompts = []
    for row, (ids, mask) in enumerate(zip(input_ids_BT.tolist(), mask_BT.tolist(), strict=True)):
        length = sum(1 for seen in mask if seen)
        if not length:
            raise ConfigError(f"prompt {row} is empty: its attention mask hides every token")
        if not all(mask[-length:]):
            raise ConfigError(
                f"the attention mask of prompt {row} hides tokens after the first visible one; "
                "expected padding on the left only",
                hint="make the tokenizer's padding_side 'left'",
            )
        prompts.append(ids[-length:])
    return prompts


def _check_keywords(input_ids: Tensor, keywords: dict[str, Any]) -> None:
    for name, value in keywords.items():
        # A multimodal model has one of what it has encoded, empty for text.
        is_empty = value is None or value is False or (isinstance(value, dict) and not value)
        if name.endswith("token_type_ids") and isinstance(value, Tensor):
            is_empty = not bool(value.any())  # 0 is text, others are images and the like
        if name not in OWN_KEYWORDS and not is_empty:
            raise _refusal(name)
    cache = keywords.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise _refusal(f"past_key_values with {cache.get_seq_length()} tokens")
    states = keywords.get("cache_params")
    if states is not None and states.has_previous_state():
        raise _refusal("cache_params with a state")
    mask, positions = keywords.get("attention_mask"), keywords.get("position_ids")
    if positions is None:
        return
    expected_positions = (torch.ones_like(input_ids) if mask is None else mask).long().cumsum(
        -1
    ) - 1
    differ = positions.long() != expected_positions.to(positions.device)
    if mask is not None:
        differ &= mask.to(positions.device).bool()
    if bool(differ.any()):
        raise _refusal("position_ids other than 0, 1, 2, …")


def _check_same(what: str, passed: Any, configured: Any) -> None:
    """Raises ConfigError unless these are the objects that the settings ask for, in order."""
    remaining = list(configured)
    for processor in passed or ():
        if not remaining or not _equal(processor, remaining.pop(0)):
            raise _refusal(f"the {what} {type(processor).__name__} of your own")


def _equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            _equal(first[key], second[key]) for key in first
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second) or (
        hasattr(first, "__dict__") and _equal(vars(first), vars(second))
    )


def _refusal(what: str, expected: str = "") -> ConfigError:
    return ConfigError(
        f"medusa-kit's generate cannot honour {what}{expected}",
        hint="leave it out, or call generate without custom_generate",
    )
