"""Tiny random multimodal checkpoints, one of each kind whose text part is promised.

The text part is that of `tiny_models`; towers for images and sound are as small as their classes
allow.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.base.text_part import _no_towers
from support.tiny_models import EXPERTS, HEAD, STOP, TWO, UNTIED, VOCAB, WINDOW

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "patch_size": 4, "image_size": 8}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
               "patch_size": 4, "out_hidden_size": 32}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                             "mrope_section": [4, 2, 2]}}  # fmt: skip
QWEN = {**TWO, "num_attention_heads": 2, "num_key_value_heads": 1, **MROPE}
GEMMA3 = {**TWO, "head_dim": 16, **WINDOW, "query_pre_attn_scalar": 16}
GEMMA3N = {**TWO, **HEAD, "num_hidden_layers": 4, "sliding_window": 6,
           "layer_types": WINDOW["layer_types"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 4,
           "activation_sparsity_pattern": [0.0] * 4, "vocab_size_per_layer_input": VOCAB,
           "hidden_size_per_layer_input": 8}  # fmt: skip
GEMMA4 = {**TWO, **HEAD, **UNTIED, **WINDOW, "global_head_dim": 8,
          "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}  # fmt: skip
AUDIO = {"hidden_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2,
         "sscp_conv_channel_size": [4, 2]}  # fmt: skip
STATE = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# model_type, the text part's config, the rest of the whole's
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", {**GEMMA3, **UNTIED},
               {"vision_config": {"model_type": "siglip_vision_model", **VISION},
                "mm_tokens_per_image": 4, **UNTIED}),
    "gemma3-tied": ("gemma3", GEMMA3,
                    {"vision_config": {"model_type": "siglip_vision_model", **VISION},
                     "mm_tokens_per_image": 4}),
    "mistral3": ("mistral3", {"model_type": "mistral", **TWO, "head_dim": 16,
                              "sliding_window": None},
                 {"vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8}}),
    "qwen2_vl": ("qwen2_vl", QWEN, {"vision_config": {
        "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}}),
    "qwen2_5_vl": ("qwen2_5_vl", QWEN, {"vision_config": QWEN_VISION}),
    "qwen3_vl": ("qwen3_vl", {**QWEN, "head_dim": 16},
                 {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0],
                                    "num_position_embeddings": 16}}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {**QWEN, "head_dim": 16, **MOE},
                     {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0],
                                        "num_position_embeddings": 16}}),
    "qwen3_5": ("qwen3_5", {**TWO, **HEAD, **STATE,
                            "rope_parameters": {**MROPE["rope_parameters"],
                                                "mrope_section": [1, 1, 0],
                                                "partial_rotary_factor": 0.5}},
                {"vision_config": {**QWEN_VISION, "num_position_embeddings": 16}}),
    "llama4": ("llama4", {**TWO, **HEAD, **EXPERTS, "intermediate_size_mlp": 48,
                          "layer_types": ["full_attention"] * 2},
               {"vision_config": {**VISION, "vision_output_dim": 16, "projector_input_dim": 16,
                                  "projector_output_dim": 16}}),
    "gemma3n": ("gemma3n", GEMMA3N,
                {"vision_config": {"hidden_size": 16, "architecture": "resnet18"},
                 "audio_config": AUDIO}),
    "gemma4": ("gemma4", GEMMA4, {"vision_config": {
        **VISION, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8},
        "audio_config": None, **UNTIED}),
    "llava": ("llava", {"model_type": "llama", **TWO},
              {"vision_config": {"model_type": "clip_vision_model", **VISION}}),
}  # fmt: skip


def tiny_whole(kind: str, seed: int = 0, **changes: Any) -> Any:
    """transformers' whole multimodal model, seeded; STOP ends an answer. `changes`: of the text
    part's config."""
    model_type, text, rest = MULTIMODAL[kind]
    text = {**text, "eos_token_id": STOP, "bos_token_id": 1, "pad_token_id": 0, **changes}
    config = AutoConfig.for_model(model_type, text_config=text, **rest)
    torch.manual_seed(seed)
    with _no_towers(config) if kind == "gemma3n" else nullcontext():  # its tower needs timm
        model = AutoModelForMultimodalLM.from_config(config)
    model.generation_config.eos_token_id = STOP
    model.generation_config.pad_token_id = 0
    return model.eval()


def chat_folder(folder: Path, kind: str) -> Path:
    """A checkpoint of such a model with a tokenizer of bytes and a ChatML template."""
    tokenizer = byte_tokenizer()
    stop = tokenizer.eos_token_id
    model = tiny_whole(
        kind, vocab_size=len(tokenizer), vocab_size_per_layer_input=len(tokenizer),
        eos_token_id=stop, pad_token_id=tokenizer.pad_token_id, bos_token_id=stop,
        max_position_embeddings=512,
    )  # fmt: skip
    model.generation_config.eos_token_id = stop
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
