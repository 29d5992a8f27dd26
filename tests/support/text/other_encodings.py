"""Tokenizers of one vocabulary that cut text otherwise."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_kit.base.gguf import CHATML_TEMPLATE
from medusa_kit.base.model import BaseModel, wrap_model

PAIRS = [("1", "2"), ("12", "3"), ("Ġ", "Ġ")]


def with_pairs(single_digits: bool) -> Any:
    """The bytes, some pairs and the tokens of ChatML. `single_digits`: each digit is cut off before
    pairs are joined, as a file's reader may or may not know of a model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in PAIRS)]
    inner = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=PAIRS))
    parts = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    parts += [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    inner.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


def base_that_reads(single_digits: bool) -> BaseModel:
    """The same tiny Llama, whichever tokenizer it has."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = with_pairs(single_digits)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    return wrap_model(model, tokenizer, "tiny")
