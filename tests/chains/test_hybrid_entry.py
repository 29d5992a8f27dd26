"""generate() with custom_generate on models that carry a state, whose prompts may be padded."""

from typing import Any

import pytest
import torch
from support.models.hybrids import tiny_hybrid
from support.small_engines import random_heads, random_prompt

import medusa_kit
from medusa_kit.base.model import wrap_model
from medusa_kit.errors import ConfigError


def padded(*lengths: int) -> dict[str, Any]:
    most = max(lengths)
    ids = [[0] * (most - n) + random_prompt(n, n) for n in lengths]
    mask = [[0] * (most - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "mamba2"])
def test_answers_are_those_of_plain_generate(family: str) -> None:
    model = tiny_hybrid(family)
    heads = random_heads(wrap_model(tiny_hybrid(family), None, family))
    by_heads = medusa_kit.custom_generate_with(heads=heads)
    attention = model.config._attn_implementation
    for inputs in (padded(9), padded(5, 19, 11)):
        lengths = inputs["attention_mask"].sum(1).tolist()
        plain = [
            model.generate(**padded(length), max_new_tokens=14)[0, length:] for length in lengths
        ]
        for entry in (medusa_kit.custom_generate, by_heads):
            answer = model.generate(**inputs, max_new_tokens=14, custom_generate=entry)
            for row, alone in zip(answer, plain, strict=True):
                own = row[max(lengths) :]
                assert torch.equal(own[: len(alone)], alone)
                assert not own[len(alone) :].any()  # padding
    assert model.config._attn_implementation == attention


def test_a_state_that_is_given_is_refused() -> None:
    model, inputs = tiny_hybrid("mamba2"), padded(9)
    read = model(inputs["input_ids"][:, :4], use_cache=True).cache_params
    with pytest.raises(ConfigError, match="cannot honour cache_params"):
        model.generate(
            **inputs,
            cache_params=read,
            max_new_tokens=4,
            custom_generate=medusa_kit.custom_generate,
        )
