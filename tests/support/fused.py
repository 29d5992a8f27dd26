"""Tiny models whose forwards run by the fused kernels, interpreted where there is no GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.device.fused_model import EXACT
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.tree.shape import path_to
from support.attention_inputs import DEVICE
from support.tiny_models import model_of

LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 512, "hidden_size": 32,
          "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
KINDS = {"layer_types": ["sliding_attention", "full_attention"]}


def fused_model(name: str, **changes: Any) -> Any:
    """One of MODELS with two small layers, seeded."""
    kinds = KINDS if name.startswith("gemma3") else {}
    return model_of(name, **{**LAYERS, **kinds, **changes}).to(DEVICE).requires_grad_(False)


def fused_verifier(base: BaseModel, mode: str = EXACT) -> CapturedVerifier:
    """As at load, without the check there."""
    from medusa_kit.infer.device.fused_forward import FusedForward
    from medusa_kit.infer.device.fused_model import FusedModel

    verifier = CapturedVerifier(base, AttentionChoice(fixed_shapes=True))
    verifier.fused = FusedForward(FusedModel.of(base), mode == EXACT)
    return verifier


def fused_base(name: str, **changes: Any) -> BaseModel:
    return wrap_model(fused_model(name, **changes), None, name)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (count,), generator=generator).tolist()


def trees_of(parents: Sequence[Sequence[int]], device: torch.device) -> Forest:
    """Trees with these parents and random tokens."""
    tokens = [random_tokens(len(tree), seed) for seed, tree in enumerate(parents)]
    return Forest.of(tokens, parents, device)


def plain_logits(
    model: Any, prompts: Sequence[list[int]], trees: Forest, parents: Sequence[Sequence[int]]
) -> Tensor:
    """logits_NV after each node by plain forwards over prompt and path."""
    found = list[Tensor]()
    for prompt, tokens, tree in zip(prompts, trees.token_lists(), parents, strict=True):
        for node in range(len(tree)):
            text = prompt + [tokens[one] for one in path_to(node, tree)]
            ids = torch.tensor([text], device=DEVICE)
            found.append(model(ids, use_cache=False).logits[0, -1])
    return torch.stack(found)


def read_by_torch(
    verifier: CapturedVerifier, cache: TreeCache, rows: Sequence[int], prompts: list[list[int]]
) -> None:
    """Long prompts take the interpreter too long."""
    Verifier.read_prompts(verifier, cache, rows, prompts)


def one_by_one(verifier: CapturedVerifier, cache: TreeCache, row: int, tokens: list[int]) -> Tensor:
    """logits_TV of tokens that are read after one row one at a time, as plain decoding does."""
    found = list[Tensor]()
    for token in tokens:
        nodes = Forest.chains([[token]], verifier.base.device)
        found.append(verifier.score(cache, nodes, [row]).logits_NV[0])
        cache.commit([[0]], [row])
    return torch.stack(found)
