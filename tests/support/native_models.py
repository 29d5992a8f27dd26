"""Models of every family whose steps run in C++, and weights of every form."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.infer.cpu.packing import Blocks
from support.tiny_models import COMMON, SLIDING, STOP

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


def random_blocks(codes: tuple[int, int], group: int, offsets: bool, halves: bool = True) -> Blocks:
    rows, inputs = 37, 64
    generator = torch.Generator().manual_seed(1)
    scales = torch.rand(rows, inputs // group, generator=generator).half().float()
    shifts = torch.randn(rows, inputs // group, generator=generator).half().float()
    scales[0, 0], shifts[1, 0] = 2.0**-24, -(2.0**-15)  # halves without a leading bit
    if not halves:
        scales *= 1 + 2.0**-6
    drawn = torch.randint(*codes, (rows, inputs), generator=generator).to(torch.int8)
    return Blocks(drawn, scales, shifts if offsets else None)


BLOCKS = {
    "int4": random_blocks((0, 16), 32, True),
    "int8": random_blocks((-128, 128), 32, False),
    "int8+": random_blocks((-16, 32), 32, True),
    "int8 by 16": random_blocks((-32, 32), 16, False),
    "int8+ by 16": random_blocks((0, 4), 16, True),
    "int4, wide": random_blocks((0, 16), 32, True, halves=False),
    "int8+, wide": random_blocks((-16, 32), 32, True, halves=False),
}


def weights_of(kind: str) -> torch.Tensor:
    if kind in BLOCKS:
        return BLOCKS[kind].expand()
    weights = torch.randn(37, 50, generator=torch.Generator().manual_seed(2))
    return weights.bfloat16().float() if kind == "bfloat16" else weights
