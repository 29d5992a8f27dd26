"""Models of real shapes with random weights, made on the device, so that nothing is downloaded.

Speed does not depend on the values of weights, but every method has to decode the same text, or
acceptance could not be set. `chained` weights ensure this: attention and MLP add little to a
token's own embedding, and the output embedding gives each token one successor, by a margin that
rounding cannot overcome. Successors form one cycle over the whole vocabulary, so no token repeats.
This needs a separate output embedding, also where the real model ties it. `wide` weights are for
exactness: their spread is so large that attention matters and greedy answers vary.

Shapes: V vocabulary, D hidden.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.fingerprint import Fingerprint
from medusa_kit.base.model import BaseModel

LIKELIEST_LOGIT = 15.0  # of a successor under `chained`; in 16 bits steps are finer than at 17
# In standard deviations of the others: above their largest, which is at 4.5, and small enough for a
# rounding in 16 bits that the self-check at load accepts.
LIKELIEST_MARGIN = 8.0
ADDED_BY_A_LAYER = 0.02  # relative to the embeddings' RMS, about
ROWS_AT_A_TIME = 8192
NARROW = 0.02  # the usual spread of initial weights


@dataclass(frozen=True)
class Shape:
    """A Llama of these sizes, with the name of the real model."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    context_length: int = 8192
    rope_theta: float = 500000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def linear_weights(self) -> int:
        """The weights that a step reads: all linear layers and the output embedding."""
        D, keys = self.hidden_size, self.num_key_value_heads * self.head_dim
        layer = 2 * D * D + 2 * D * keys + 3 * D * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * D

    @property
    def all_weights(self) -> int:
        """The weights of all linear layers and both embeddings."""
        return self.linear_weights + self.vocab_size * self.hidden_size

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments of a LlamaConfig."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context_length,
        }


SMOLLM2_135M = Shape("SmolLM2-135M", 576, 1536, 30, 9, 3, 49152, rope_theta=100000.0)
LLAMA_1B = Shape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 128256, 131072)
LLAMA_8B = Shape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128256, 131072)
EXACTNESS = Shape("exactness", 256, 512, 4, 8, 4, 512, 2048)


def tiny(shape: Shape) -> Shape:
    """A tiny shape under the name of `shape`, for a dry run."""
    return Shape(shape.name, 32, 48, 1, 4, 2, 128, 512)


def random_base(
    shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0, wide: bool = False
) -> BaseModel:
    """A base model without a tokenizer and without a stop token."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        config = config_of(shape, shape.hidden_size**-0.5 if wide else NARROW)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    if not wide:
        _chain(model, successors(shape.vocab_size, device))
    name = f"random weights in the shape of {shape.name}"
    # A fingerprint of 16 GB of random numbers would take a minute, and nothing compares it.
    return BaseModel(model, None, name, "memory", known=Fingerprint("random", shape.name))


def config_of(shape: Shape, spread: float = NARROW) -> Any:
    """A config of transformers. `spread`: of the random weights."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **shape.sizes,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def successors(vocab_size: int, device: torch.device) -> Tensor:
    """next_V: the token that follows each token; one cycle over all of them."""
    order_V = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))
    next_V = torch.empty_like(order_V)
    next_V[order_V] = order_V.roll(-1)
    return next_V.to(device)


@torch.no_grad()
def _chain(model: Any, next_V: Tensor) -> None:
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.mul_(ADDED_BY_A_LAYER)
    embedding_VD = model.get_input_embeddings().weight
    embedding_VD.normal_()
    D = embedding_VD.shape[1]
    for tokens in torch.arange(len(next_V), device=next_V.device).split(ROWS_AT_A_TIME):
        own_XD = embedding_VD[tokens].float()
        # The addition is orthogonal to the token's own direction, so its logit does not change.
        others_XD = torch.randn_like(own_XD)
        share_X1 = (others_XD * own_XD).sum(1, keepdim=True) / own_XD.square().sum(1, keepdim=True)
        missing = max(0.0, LIKELIEST_MARGIN**-2 - 1 / D) ** 0.5
        row_XD = own_XD / D + (others_XD - share_X1 * own_XD) * missing / D**0.5
        model.lm_head.weight[next_V[tokens]] = (LIKELIEST_LOGIT * row_XD).to(embedding_VD.dtype)
