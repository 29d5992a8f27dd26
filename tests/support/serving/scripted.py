"""A model that writes a script: after each token the next one of it, whatever came before."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_kit.base.model import BaseModel, wrap_model
from support.serving.tagged import tagged_tokenizer

STOP = "<|im_end|>"


def scripted_base(
    script: Sequence[str], template: str, special: Sequence[str] = (), name: str = "scripted"
) -> BaseModel:
    """`script`: tokens, each there once, which are added to the tokenizer's where they are new; a
    prompt ends with a line break. Those in `special` are special ones."""
    tokenizer = tagged_tokenizer(special, [t for t in script if t not in special], template)
    tokenizer.padding_side = "left"
    base = wrap_model(_model(tokenizer, ["Ċ", *script, STOP]), tokenizer, name)
    base.model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(STOP)]
    return base


def _model(tokenizer: Any, chain: Sequence[str]) -> LlamaForCausalLM:
    """Without layers that say anything, so that the last token's embedding is all there is."""
    ids = tokenizer.convert_tokens_to_ids(list(chain))
    assert len({*ids}) == len(chain)
    size = 8 * (len(tokenizer) // 8 + 1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=size, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, max_position_embeddings=2048, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for part in model.parameters():
            part.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), size))
        for before, after in pairwise(ids):
            model.lm_head.weight[after, before] = 1
    return model
