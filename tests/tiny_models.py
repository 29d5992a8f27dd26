"""Tiny random models of the families medusa-kit promises to hold for.

Weights are drawn ten times wider than usual, so that attention matters and greedy answers vary.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base_model import BaseModel, wrap_model

VOCAB, CONTEXT, STOP = 96, 128, 2
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT,
        "initializer_range": 0.2, "use_cache": True}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
NEOX = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", COMMON),
    "llama-tied": ("llama", {**COMMON, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**COMMON, "sliding_window": None}),
    "mistral-sliding": ("mistral", {**COMMON, "sliding_window": 7}),
    "qwen2": ("qwen2", COMMON),
    "qwen3": ("qwen3", {**COMMON, "head_dim": 8}),
    "gemma3": ("gemma3_text", {**COMMON, "head_dim": 8, "sliding_window": 6,
                               "layer_types": SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3-capped": ("gemma3_text", {**COMMON, "head_dim": 8, "sliding_window": 6,
                                      "layer_types": SLIDING, "query_pre_attn_scalar": 8,
                                      "final_logit_softcapping": 3.0}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", NEOX),
    "phi3": ("phi3", {**COMMON, "sliding_window": None}),
    "olmo2": ("olmo2", COMMON),
    "mixtral": ("mixtral", {**COMMON, "num_local_experts": 4, "sliding_window": None}),
    "granite-scaled": ("granite", {**COMMON, "logits_scaling": 4.0}),
    "cohere-scaled": ("cohere", {**COMMON, "logit_scale": 0.3}),
}  # fmt: skip

# The families that are promised (the others here stand for scaled, capped and tied logits).
PROMISED = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2", "gpt_neox", "phi3", "olmo2",
            "mixtral"]  # fmt: skip


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of `family`, seeded; STOP ends an answer."""
    model_type, arguments = FAMILIES[family]
    config = AutoConfig.for_model(
        model_type, **{**arguments, "eos_token_id": STOP, "bos_token_id": 1, "pad_token_id": 0,
                       **changes}
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.generation_config.eos_token_id = STOP
    model.generation_config.pad_token_id = 0
    return model.eval()


def tiny_base(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> BaseModel:
    return wrap_model(tiny_model(family, seed).to(dtype), None, f"tiny-{family}")
