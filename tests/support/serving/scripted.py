"""Models that write a script, whatever came before: after each token the next one of it, or from a
place of the text on."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

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


PLACES = 1024  # that a text may have


def placed_base(
    script: Sequence[str],
    template: str,
    special: Sequence[str],
    messages: Sequence[dict[str, Any]],
    stops: Sequence[str] = (STOP,),
    **keywords: Any,
) -> BaseModel:
    """`script`: tokens that may come again; it begins behind the prompt of these messages and ends
    with the first of `stops`. `keywords`: of the template."""
    plain = [token for token in dict.fromkeys(script) if token not in special]
    tokenizer = tagged_tokenizer(special, plain, template)
    tokenizer.padding_side = "left"
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **keywords
    )
    ids = tokenizer.convert_tokens_to_ids([*script, stops[0]])
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=PLACES, n_embd=PLACES, n_layer=1, n_head=1,
            tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for part in model.parameters():
            part.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wpe.weight.copy_(torch.eye(PLACES))
        for place, token in enumerate(ids, start=len(prompt) - 1):
            model.lm_head.weight[token, place] = 1
    base = wrap_model(model, tokenizer, "scripted")
    base.model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(stops))
    return base
