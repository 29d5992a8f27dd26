"""Heads with random weights on tiny bases, for the C++ kernels."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import wrap_model
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.cpu.packed.int8_weights import rounded
from support.tiny_models import COMMON, STOP

WIDE = {**COMMON, "hidden_size": 96, "head_dim": 16, "num_attention_heads": 6}
FAMILIES = {
    "llama": ("llama", {}),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
    ),
}
NUM_HEADS = 3


def base_of(family):
    model_type, arguments = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**WIDE, "eos_token_id": STOP, **arguments})
    torch.manual_seed(0)
    return wrap_model(AutoModelForCausalLM.from_config(config).eval(), None, family)


def trained(base, kind, projection, num_blocks=2, mlp_size=160):
    """Heads without the kernels. Their weights are those of eight bits already, so that torch
    computes with the same ones. `mlp_size`: of recurrent heads."""
    some = torch.arange(1, base.info.vocab_size, 2) if projection == "reduced" else None
    size = mlp_size if kind == "recurrent" else None
    heads = MedusaHeads.for_base(base, NUM_HEADS, num_blocks, projection, some, kind, size)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    for layer in own_layers(heads):
        layer.weight.data = rounded(layer, layer.weight.data)
    return heads.requires_grad_(False)


def own_layers(heads):
    """What the kernels store in eight bits."""
    shared = heads.recurrent.modules() if heads.recurrent else ()
    return [
        *(block.linear for head in heads.blocks for block in head),
        *(module for module in shared if isinstance(module, torch.nn.Linear)),
        *heads.projections,
    ]


def inputs(base, rows, path_length=NUM_HEADS):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, base.info.hidden_size, generator=generator)
    paths = torch.randint(-1, base.info.vocab_size, (rows, path_length), generator=generator)
    return hidden, paths
