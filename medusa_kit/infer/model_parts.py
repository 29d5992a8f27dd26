"""The parts of a dense model, read from its modules, or why kernels of the kit's own cannot run it.

The C++ decoder and the fused forward on a device read one description. The list of families is
short on purpose, and each model is still self-checked at load, since a family may hide a multiplier
that no module shows.

Shapes: X any leading shape, D size of a norm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_kit.base.attributes import Attributes
from medusa_kit.base.hooks import foreign_hooks
from medusa_kit.base.model_state import CHANGING_ROTARY, is_of_plain_code
from medusa_kit.base.own_code import replaced_function

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "gemma3",
            "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")  # fmt: skip
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SANDWICH_PARTS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Unsupported(Exception):
    """Why kernels of the kit's own cannot run this model; an answer, not a failure."""


@dataclass(frozen=True)
class LayerParts:
    """Modules of one layer and its effective norm weights (None where the family has none)."""

    queries: nn.Linear
    keys: nn.Linear
    values: nn.Linear
    out: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    input_norm: Tensor
    after_attention_norm: Tensor | None
    before_mlp_norm: Tensor
    after_mlp_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    rotary_type: str | None
    attention: nn.Module

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return (self.queries, self.keys, self.values, self.out, self.gate, self.up, self.down)

    @property
    def window(self) -> int:
        """Positions in sight of a sliding layer, as the model has it now; 0 for all."""
        window = getattr(self.attention, "sliding_window", None)
        if window is None and getattr(self.attention.config, "model_type", "") == "mistral":
            window = self.attention.config.sliding_window  # type: ignore[union-attr]
        return int(window or 0)


@dataclass(frozen=True)
class ModelParts:
    layers: list[LayerParts]
    final_norm: Tensor
    embedding: nn.Embedding
    output: nn.Linear
    rotary: Any
    gelu: bool
    norm_epsilon: float
    scale: float
    query_heads: int
    kv_heads: int
    head_size: int


def check_family(config: Any) -> None:
    """Raises Unsupported for a family that has no description, or whose functions of transformers
    others have taken the place of."""
    if config.model_type not in FAMILIES:
        raise Unsupported(f"no description of {config.model_type!r}")
    if (name := replaced_function(config)) is not None:
        raise Unsupported(f"{name} of transformers was replaced by other code")


def describe(model: Any, check_weights: Callable[[Any], None]) -> ModelParts:
    """Raises Unsupported, with the reason. `check_weights` raises it for weights that the runner
    does not read."""
    config = model.config.get_text_config()
    check_family(config)
    check_weights(model)  # first: a library that quantises replaces functions too
    _check_code(model)
    decoder = model.get_decoder()
    if any(t in CHANGING_ROTARY for t in rotary_kinds(decoder.rotary_emb)):
        raise Unsupported("its rotary embedding changes with the length")
    epsilons: set[float] = set()
    # As many as the config says: transformers runs no more, and the cache has room for no more.
    used = decoder.layers[: config.num_hidden_layers]
    layers = [_layer(layer, config, epsilons) for layer in used]
    final_norm = effective_norm(decoder.norm, epsilons)
    if len(epsilons) != 1:
        raise Unsupported(f"norms with several epsilons {sorted(epsilons)}")
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise Unsupported("its output embedding is not a linear layer")
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise Unsupported("its input embedding is of another kind")
    first = decoder.layers[0].self_attn
    return ModelParts(
        layers, final_norm, embedding, output, decoder.rotary_emb,
        _is_gelu(decoder.layers[0].mlp.act_fn), epsilons.pop(), float(first.scaling),
        int(config.num_attention_heads), int(config.num_key_value_heads), int(first.head_dim),
    )  # fmt: skip


def _check_code(model: Any) -> None:
    """Raises Unsupported where the model runs code that no description shows."""
    if hooks := foreign_hooks(model):
        name, _ = hooks[0]
        raise Unsupported(f"{name or 'the model'} carries a hook, which no kernel of the kit runs")
    if other := next((m for m in model.modules() if not is_of_plain_code(m)), None):
        raise Unsupported(f"a module of other code, {type(other).__name__}")
    if other := next((m for m in model.modules() if "forward" in vars(m)), None):
        raise Unsupported(f"a module with a forward of its own, {type(other).__name__}")
    if other := next((m for m in model.modules() if Attributes(m).runs_other_code), None):
        raise Unsupported(f"a function of other code in {type(other).__name__}")


def rotary_kinds(rotary: Any) -> list[str]:
    kinds = getattr(rotary, "rope_type", "default")
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


def _layer(layer: Any, config: Any, epsilons: set[float]) -> LayerParts:
    parts = {name for name, _ in layer.named_children()}
    sandwich = parts == LAYER_PARTS | SANDWICH_PARTS
    if parts != LAYER_PARTS and not sandwich:
        raise Unsupported(f"layers with parts {sorted(parts)}")
    attention, mlp = layer.self_attn, layer.mlp
    if not {name for name, _ in attention.named_children()} <= ATTENTION_PARTS:
        raise Unsupported("attention with unknown parts")
    if not {name for name, _ in mlp.named_children()} <= MLP_PARTS:
        raise Unsupported("an MLP with unknown parts")
    if getattr(attention, "attn_logit_softcapping", None) is not None:
        raise Unsupported("attention with a soft cap")

    def norm(owner: Any, name: str) -> Tensor | None:
        module = getattr(owner, name, None)
        return None if module is None else effective_norm(module, epsilons)

    linears = [
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    ]  # fmt: skip
    if not all(isinstance(linear, nn.Linear) for linear in linears):
        raise Unsupported("linear layers of another kind")
    after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
    before_mlp = norm(layer, before if sandwich else after)
    input_norm = norm(layer, "input_layernorm")
    assert input_norm is not None
    assert before_mlp is not None
    queries, keys, values, out, gate, up, down = linears
    return LayerParts(
        queries, keys, values, out, gate, up, down,
        input_norm=input_norm,
        after_attention_norm=norm(layer, after) if sandwich else None,
        before_mlp_norm=before_mlp,
        after_mlp_norm=norm(layer, "post_feedforward_layernorm") if sandwich else None,
        q_norm=norm(attention, "q_norm"),
        k_norm=norm(attention, "k_norm"),
        rotary_type=getattr(attention, "layer_type", None),
        attention=attention,
    )  # fmt: skip


@torch.no_grad()
def effective_norm(module: Any, epsilons: set[float]) -> Tensor:
    """The weight w of x / rms(x) · w that `module` computes; adds its epsilon to `epsilons`.

    Some families store w - 1; a forward on random numbers shows which one it is.
    """
    names = ("variance_epsilon", "eps", "epsilon")
    epsilon = next((float(getattr(module, n)) for n in names if hasattr(module, n)), None)
    weight_D = getattr(module, "weight", None)
    if epsilon is None or weight_D is None:
        raise Unsupported(f"a norm of another kind, {type(module).__name__}")
    x_XD = torch.randn(
        3, len(weight_D), dtype=torch.float32, generator=torch.Generator().manual_seed(0)
    )
    x_XD = x_XD.to(weight_D.device)
    expected_XD = module(x_XD)
    for candidate_D in (weight_D.detach().float(), 1.0 + weight_D.detach().float()):
        actual_XD = F.rms_norm(x_XD, weight_D.shape, candidate_D, epsilon)
        if torch.allclose(actual_XD, expected_XD, rtol=1e-5, atol=1e-6):
            epsilons.add(epsilon)
            return candidate_D.contiguous()
    raise Unsupported(f"a norm of another kind, {type(module).__name__}")


@torch.no_grad()
def _is_gelu(activation: Any) -> bool:
    x_X = torch.linspace(-6, 6, 101, dtype=torch.float32)
    expected_X = activation(x_X)
    if torch.allclose(expected_X, F.silu(x_X), atol=1e-6):
        return False
    if torch.allclose(expected_X, F.gelu(x_X, approximate="tanh"), atol=1e-6):
        return True
    raise Unsupported(f"the activation {type(activation).__name__}")
