"""Tiny random models of families that carry a state from token to token.

Each has a layer with a state and, where the family has attention, one layer of that. Chunks and
windows are a few tokens long, so that a short text crosses them.
"""

from typing import Any

import torch
from support.tiny_models import COMMON, CONTEXT, EXPERTS, HEAD, LATENT, ROUTED, STOP, UNTIED, VOCAB
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import BaseModel, wrap_model

CHUNK = 8  # tokens that a Mamba layer reads at a time
LINEAR, FULL = "linear_attention", "full_attention"
# State layers around one of attention, so that states are read before and after it.
LAYERS = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8}  # fmt: skip
QWEN = {**COMMON, **HEAD, **LAYERS, **DELTA}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16}  # fmt: skip
CONV = {**COMMON, "num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"], **UNTIED}
MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
           "mamba_chunk_size": CHUNK}  # fmt: skip
# Zamba 2 and Nemotron-H clamp the steps of their states from below (0.001) where they read several
# tokens, and not where they read one. Steps of 0.1 are never clamped.
STEP = {"time_step_floor": 0.1}
# Mamba without attention: no heads of attention, no context.
ALONE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2,
         **UNTIED}  # fmt: skip

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**QWEN, **QWEN_EXPERTS}),
    "qwen3_5": ("qwen3_5_text", QWEN),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**QWEN, **QWEN_EXPERTS}),
    "nemotron_h": ("nemotron_h", {**COMMON, **HEAD, "layers_block_type": [LINEAR, FULL, "mlp"],
                                  "num_hidden_layers": 3, "ssm_state_size": 8, "n_groups": 2,
                                  "mamba_num_heads": 4, "mamba_head_dim": 16,
                                  "chunk_size": CHUNK, **STEP}),
    "nemotron_h-moe": ("nemotron_h", {**COMMON, **HEAD, **ROUTED,
                                      "layers_block_type": [LINEAR, "moe", FULL, LINEAR],
                                      "num_hidden_layers": 4, "ssm_state_size": 8, "n_groups": 2,
                                      "mamba_num_heads": 4, "mamba_head_dim": 16,
                                      "moe_shared_expert_intermediate_size": 16,
                                      "chunk_size": CHUNK, **STEP}),
    "lfm2": ("lfm2", {**CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {**CONV, "num_experts": 4, "num_experts_per_tok": 2,
                              "moe_intermediate_size": 16, "num_dense_layers": 1}),
    "granitemoehybrid": ("granitemoehybrid", {**COMMON, **EXPERTS, **LAYERS, **MAMBA_2,
                                              "position_embedding_type": "rope",
                                              "shared_intermediate_size": 16}),
    "falcon_h1": ("falcon_h1", {**COMMON, "num_hidden_layers": 2, **MAMBA_2, "mamba_d_ssm": 64}),
    "jamba": ("jamba", {**COMMON, "num_hidden_layers": 4, "attn_layer_period": 3,
                        "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8}),
    "bamba": ("bamba", {**COMMON, **MAMBA_2, "attn_layer_indices": [1]}),
    "zamba2": ("zamba2", {**COMMON, "layers_block_type": [LINEAR, "hybrid", LINEAR],
                          "num_key_value_heads": 4, "mamba_d_state": 8, "n_mamba_heads": 4,
                          "chunk_size": CHUNK, "use_mem_rope": True, **STEP, **UNTIED}),
    "kimi_linear": ("kimi_linear", {**COMMON, **LAYERS, **LATENT, "linear_head_dim": 8,
                                    "linear_num_heads": 4, "num_local_experts": 4,
                                    "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "olmo_hybrid": ("olmo_hybrid", {**COMMON, **LAYERS, **DELTA}),
    "mamba2": ("mamba2", {**ALONE, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2,
                          "chunk_size": CHUNK}),
    "falcon_mamba": ("falcon_mamba", {**ALONE, "state_size": 8}),
    "mamba": ("mamba", {**ALONE, "state_size": 8}),
    "minimax": ("minimax", {**COMMON, **EXPERTS, **HEAD, **LAYERS, "block_size": CHUNK}),
    "recurrent_gemma": ("recurrent_gemma", {**COMMON, "attention_window_size": 6,
                                            "block_types": ["recurrent", "attention"],
                                            "num_hidden_layers": 3, "w_init_variance_scale": 1.0,
                                            **UNTIED}),
    "rwkv": ("rwkv", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
                      "context_length": CONTEXT, **UNTIED}),
}  # fmt: skip
# Those that are decoded with chains; the others are refused, with the reason.
REFUSED = ("jamba", "falcon_mamba", "mamba", "recurrent_gemma", "rwkv")
CHAINS = [
    family
    for family, (kind, _) in HYBRIDS.items()
    if family not in REFUSED and kind in CONFIG_MAPPING  # older versions lack some
]


def tiny_hybrid(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of `family`, seeded; STOP ends an answer."""
    model_type, arguments = HYBRIDS[family]
    tokens = {"eos_token_id": STOP, "bos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **{**arguments, **tokens, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # as drawn, most states forget a token within one or two
            parameter.data.sub_(3)
        if name.endswith("mixer.D"):
            parameter.data.mul_(0.3)
    model.generation_config.eos_token_id = STOP
    model.generation_config.pad_token_id = 0
    return model.eval()


def tiny_hybrid_base(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> BaseModel:
    return wrap_model(tiny_hybrid(family, seed).to(dtype), None, f"tiny-{family}")
