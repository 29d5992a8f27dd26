"""Tiny random models of the families medusa-kit promises to hold for.

Weights are drawn ten times wider than usual, so that attention matters and greedy answers vary.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import BaseModel, wrap_model

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

# Tied and scaled by √D as Gemma's are, random embeddings say the same token for ever.
UNTIED = {"tie_word_embeddings": False}

# Decoded with heads and trees, in C++ where the family has a description and `head_dim` is 16.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", COMMON),
    "llama-tied": ("llama", {**COMMON, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**COMMON, "sliding_window": None}),
    "mistral-sliding": ("mistral", {**COMMON, "head_dim": 16, "sliding_window": 7}),
    "qwen2": ("qwen2", COMMON),
    "qwen3": ("qwen3", {**COMMON, "head_dim": 16}),
    "gemma3": ("gemma3_text", {**COMMON, "head_dim": 16, "sliding_window": 6,
                               "layer_types": SLIDING, "query_pre_attn_scalar": 16, **UNTIED}),
    "gemma3-capped": ("gemma3_text", {**COMMON, "head_dim": 16, "sliding_window": 6,
                                      "layer_types": SLIDING, "query_pre_attn_scalar": 16,
                                      "final_logit_softcapping": 3.0, **UNTIED}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", NEOX),
    "phi3": ("phi3", {**COMMON, "sliding_window": None}),
    "olmo2": ("olmo2", COMMON),
    "mixtral": ("mixtral", {**COMMON, "num_local_experts": 4, "sliding_window": None}),
    "granite-scaled": ("granite", {**COMMON, "logits_scaling": 4.0}),
    "cohere-scaled": ("cohere", {**COMMON, "logit_scale": 0.3}),
}  # fmt: skip

# One of every other family that trees were verified on, with random trees through torch; windows
# are narrow enough to bite.
HEAD = {"head_dim": 8}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
          "v_head_dim": 6, "num_key_value_heads": 4}  # fmt: skip
GEMMA2 = {**HEAD, **WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0,
          "final_logit_softcapping": 3.0, **UNTIED}  # fmt: skip
# With few heads many scores are 0, and ties are broken by the order of slots. Models have 32 or 64.
INDEX = {"index_topk": 6, "index_head_dim": 8, "index_n_heads": 16}
TWO = {**COMMON, "num_hidden_layers": 2}
NEOX_TWO = {**NEOX, "num_hidden_layers": 2}
GPT2_TWO = {**GPT2, "n_layer": 2}
LONG_ROPE = {"original_max_position_embeddings": 48, "rope_parameters": {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4}}  # fmt: skip

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", TWO),
    "arcee": ("arcee", TWO),
    "cohere2": ("cohere2", {**TWO, **HEAD, **WINDOW, "logit_scale": 0.3}),
    "codegen": ("codegen", {**GPT2_TWO, "rotary_dim": 4}),
    "deepseek_v2": ("deepseek_v2", {**TWO, **LATENT, **ROUTED, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", {**TWO, **LATENT, **ROUTED}),
    "deepseek_v32": ("deepseek_v32", {**TWO, **LATENT, **ROUTED, **INDEX}),
    "ernie4_5": ("ernie4_5", {**TWO, **HEAD}),
    "exaone4": ("exaone4", {**TWO, **WINDOW}),
    "falcon": ("falcon", {**NEOX_TWO, "ffn_hidden_size": 48, "alibi": False}),
    "falcon-new": ("falcon", {**NEOX_TWO, "ffn_hidden_size": 48, "alibi": False,
                              "new_decoder_architecture": True, "num_kv_heads": 2, **UNTIED}),
    "gemma": ("gemma", {**TWO, **HEAD, **UNTIED}),
    "gemma2": ("gemma2", {**TWO, **GEMMA2}),
    "gemma3n": ("gemma3n_text", {**TWO, **HEAD, **UNTIED, "num_hidden_layers": 4,
                                 "sliding_window": 6, "layer_types": WINDOW["layer_types"] * 2,
                                 "num_kv_shared_layers": 2, "laurel_rank": 4,
                                 "activation_sparsity_pattern": [0.0] * 4,
                                 "vocab_size_per_layer_input": VOCAB,
                                 "hidden_size_per_layer_input": 8}),
    "gemma4": ("gemma4_text", {**TWO, **HEAD, **WINDOW, **UNTIED, "global_head_dim": 8,
                              "vocab_size_per_layer_input": VOCAB,
                              "hidden_size_per_layer_input": 8}),
    "glm4": ("glm4", {**TWO, **HEAD}),
    "glm4_moe": ("glm4_moe", {**TWO, **HEAD, **ROUTED}),
    "glm_moe_dsa": ("glm_moe_dsa", {**COMMON, **LATENT, **ROUTED, **INDEX,
                                    "indexer_types": ["full", "shared", "full"]}),
    "gpt_bigcode": ("gpt_bigcode", GPT2_TWO),
    "gpt_oss": ("gpt_oss", {**TWO, **HEAD, **WINDOW, **EXPERTS}),
    "gptj": ("gptj", {**GPT2_TWO, "rotary_dim": 4}),
    "granitemoe": ("granitemoe", {**TWO, **EXPERTS}),
    "granitemoehybrid": ("granitemoehybrid", {**TWO, **EXPERTS, "layer_types": ["attention"] * 2,
                                              "position_embedding_type": "rope",
                                              "shared_intermediate_size": 16, "mamba_n_heads": 8}),
    "helium": ("helium", {**TWO, **HEAD}),
    # The scale of queries changes every four positions in layers without rotation, every fourth.
    "llama4": ("llama4_text", {**COMMON, **HEAD, "attention_chunk_size": 6, "num_hidden_layers": 4,
                               "intermediate_size_mlp": 48, "num_local_experts": 4,
                               "attn_scale": 1.0, "floor_scale": 4}),
    "minimax_m2": ("minimax_m2", {**TWO, **HEAD, **EXPERTS}),
    "nemotron": ("nemotron", {**TWO, **HEAD}),
    "olmo": ("olmo", TWO),
    "olmo3": ("olmo3", {**TWO, **WINDOW}),
    "olmoe": ("olmoe", {**TWO, "num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("opt", {**NEOX_TWO, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "persimmon": ("persimmon", NEOX_TWO),
    "phi": ("phi", TWO),
    "phi3-longrope": ("phi3", {**TWO, **LONG_ROPE}),
    "phimoe": ("phimoe", {**TWO, **EXPERTS, "sliding_window": 6}),
    "qwen2_moe": ("qwen2_moe", {**TWO, "num_experts": 4, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 16, "sliding_window": 6,
                                "shared_expert_intermediate_size": 16, "max_window_layers": 1,
                                "use_sliding_window": True}),
    "qwen3_moe": ("qwen3_moe", {**TWO, **HEAD, "num_experts": 4, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 16}),
    "seed_oss": ("seed_oss", {**TWO, **HEAD}),
    "smollm3": ("smollm3", TWO),
    "stablelm": ("stablelm", TWO),
    "starcoder2": ("starcoder2", {**TWO, "sliding_window": 6}),
}  # fmt: skip
EVERY = {**FAMILIES, **MORE}
assert len(EVERY) == len(FAMILIES) + len(MORE), "a name in both hides one of them"

# The families that are promised (the others here stand for scaled, capped and tied logits).
PROMISED = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2", "gpt_neox", "phi3", "olmo2",
            "mixtral"]  # fmt: skip


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of `family`, seeded; STOP ends an answer."""
    model_type, arguments = EVERY[family]
    config = AutoConfig.for_model(
        model_type, **{**arguments, "eos_token_id": STOP, "bos_token_id": 1, "pad_token_id": 0,
                       **changes}
    )  # fmt: skip
    torch.manual_seed(seed)
    # transformers 5.17's own choice leaves out Gemma 2's soft cap
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.generation_config.eos_token_id = STOP
    model.generation_config.pad_token_id = 0
    return model.eval()


def tiny_base(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> BaseModel:
    return wrap_model(tiny_model(family, seed).to(dtype), None, f"tiny-{family}")


def coarse_base(dtype: torch.dtype) -> BaseModel:
    """A Llama whose logits hang on the last bits of its hidden states: two ways of computing the
    same differ by a fifth of the logits' spread, as those of SmolLM2-135M do in bfloat16."""
    model, often = tiny_model("llama").to(dtype), 8 / torch.finfo(dtype).eps
    model.model.norm.register_forward_hook(
        lambda module, inputs, out: (out + 0.05 * torch.sin(often * out.double())).to(out.dtype)
    )
    return wrap_model(model, None, "coarse-llama")


# Models of the families whose steps run in C++, and weights of every form that they are packed in.
# Samples of tests/precisions are drawn from them, so a new one draws others.
WIDE = {**COMMON, "hidden_size": 96, "head_dim": 16, "num_attention_heads": 6}
GEMMA = {**WIDE, "sliding_window": 6, "layer_types": SLIDING, "query_pre_attn_scalar": 16}
MODELS = {
    "llama": ("llama", WIDE),
    "llama-with-biases": ("llama", {**WIDE, "attention_bias": True}),
    "llama-3-rotary": (
        "llama",
        {**WIDE, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mistral-sliding": ("mistral", {**WIDE, "sliding_window": 7}),
    "qwen2": ("qwen2", WIDE),
    "qwen3": ("qwen3", WIDE),
    "gemma": ("gemma", {**WIDE, "num_key_value_heads": 1}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3-capped": ("gemma3_text", {**GEMMA, "final_logit_softcapping": 3.0}),
}  # fmt: skip


def model_of(name: str, **changes: Any) -> Any:
    model_type, arguments = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**arguments, "eos_token_id": STOP, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases that matter
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return model
