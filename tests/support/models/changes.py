"""Ways of changing a tiny model, and what plain transformers generate answers after them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.models.hybrids import tiny_hybrid
from support.small_engines import random_prompt
from support.tiny_models import tiny_model
from torch import nn
from torch.nn.utils import parametrize, prune

from medusa_kit.engine.engine import Engine

PROMPT, TOKENS = random_prompt(11, 3), 8
HYBRID = "qwen3_5"


def layer(model: Any) -> Any:
    """The first with attention."""
    return next(one for one in model.model.layers if hasattr(one, "self_attn"))


def write_by_numpy(model: Any) -> None:
    layer(model).mlp.down_proj.weight.detach().numpy()[:] *= -1.5


def write_one_row(model: Any) -> None:
    model.get_input_embeddings().weight.data[PROMPT[4]] *= -3


def load_others(model: Any) -> None:
    twice = {name: -1.5 * one for name, one in model.state_dict().items() if "mlp" in name}
    model.load_state_dict(twice, strict=False)


def replace_weight(model: Any) -> None:
    linear = layer(model).mlp.down_proj
    linear.weight = nn.Parameter(linear.weight.detach() * -1.5, requires_grad=False)


def replace_layer(model: Any) -> None:
    old = layer(model).self_attn.o_proj
    new = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
    new.load_state_dict({name: -1.5 * one for name, one in old.state_dict().items()})
    layer(model).self_attn.o_proj = new.requires_grad_(False).to(model.device)


def replace_attention(model: Any) -> None:
    old = layer(model).self_attn
    new = type(old)(old.config, layer_idx=old.layer_idx).eval().requires_grad_(False)
    new.load_state_dict({name: -1.5 * one for name, one in old.state_dict().items()})
    layer(model).self_attn = new.to(model.device)


def merge_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["down_proj", "o_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.5)
    adapted.merge_and_unload()


def set_epsilon(model: Any) -> None:
    norm = layer(model).input_layernorm
    setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 0.9)


class Times(nn.Module):
    """A parametrization: the layer's weight is computed at each forward."""

    factor = -1.5

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor


def parametrize_output(model: Any) -> None:
    parametrize.register_parametrization(layer(model).self_attn.o_proj, "weight", Times())


CHANGES: dict[str, Callable[[Any], object]] = {
    "merged by peft": merge_adapter,
    "by data": lambda model: layer(model).mlp.down_proj.weight.data.mul_(-1.5),
    "one row": write_one_row,
    "by numpy": write_by_numpy,
    "set_": lambda m: layer(m).mlp.down_proj.weight.set_(layer(m).mlp.down_proj.weight * -1.5),
    "state_dict": load_others,
    "parameter": replace_weight,
    "module": replace_layer,
    "attention": replace_attention,
    "rope": lambda model: model.model.rotary_emb.inv_freq.mul_(3),
    "norm": lambda model: layer(model).input_layernorm.weight.data.mul_(-2),
    "epsilon": set_epsilon,
    "output": lambda model: model.get_output_embeddings().weight.data.mul_(-1),
    "pruned": lambda model: prune.l1_unstructured(layer(model).self_attn.o_proj, "weight", 0.5),
    "parametrized": parametrize_output,
    "hook": lambda model: layer(model).mlp.register_forward_hook(lambda m, inputs, out: -out),
}


def change(model: Any, way: str) -> None:
    with torch.no_grad():
        CHANGES[way](model)


def plain(model: Any, tokens: int = TOKENS) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return out[0, len(PROMPT) :].tolist()


def made(family: str) -> Any:
    model = tiny_hybrid(family) if family == HYBRID else tiny_model(family)
    model.generation_config.eos_token_id = None
    return model


@cache
def expected(family: str, ways: tuple[str, ...] = (), tokens: int = TOKENS) -> list[int]:
    model = made(family)
    for way in ways:
        change(model, way)
    return plain(model, tokens)


def answer(engine: Engine, tokens: int = TOKENS) -> list[int]:
    return engine.generate(PROMPT, max_new_tokens=tokens, drafter="recycling").token_ids
