"""Random models of each family, verifiers around them, and prompts in their caches.

Shapes: T nodes, V vocabulary.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.fingerprint import Fingerprint
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.device.cache import FixedCache
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.forest import Forest

VOCAB = 4096
# Hidden, query heads, key/value heads, head size, MLP; what else the family has.
FAMILIES: dict[str, tuple[str, tuple[int, int, int, int, int], dict[str, Any]]] = {
    "llama": ("llama", (1024, 8, 2, 128, 2816), {}),
    "mistral": ("mistral", (1024, 8, 2, 128, 2816), {"sliding_window": 96}),
    "qwen2": ("qwen2", (896, 14, 2, 64, 2432), {}),
    "qwen3": ("qwen3", (1024, 16, 8, 128, 3072), {}),
    "gemma3": ("gemma3_text", (640, 4, 1, 256, 2048),
               {"sliding_window": 96, "query_pre_attn_scalar": 256,
                "layer_types": ["sliding_attention", "full_attention"] * 2}),
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 2,
}  # fmt: skip
TINY_KINDS = ["sliding_attention", "full_attention"]


def random_family(name: str, dtype: torch.dtype, tiny: bool) -> BaseModel:
    """Weights of so large a spread that attention matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, (hidden, heads, groups, head_size, size), more = FAMILIES[name]
    sizes = {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": head_size, "intermediate_size": size, "num_hidden_layers": 4,
        "vocab_size": VOCAB, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "initializer_range": hidden**-0.5, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, **more,
    }  # fmt: skip
    if tiny:
        sizes |= TINY | {"initializer_range": 0.2}
        if "layer_types" in sizes:
            sizes["layer_types"] = TINY_KINDS
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        config = AutoConfig.for_model(kind, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    return BaseModel(model, None, f"random {name}", "memory", known=Fingerprint("random", name))


def verifier_of(base: BaseModel, mode: str | None) -> CapturedVerifier:
    """Raises RuntimeError where the fused forward is asked for and not used."""
    verifier = CapturedVerifier(base, AttentionChoice(fixed_shapes=True))
    verifier.fuse(mode)
    if mode is not None and verifier.fused is None:
        raise RuntimeError("the fused forward is not used; the line above says why")
    return verifier


def random_tokens(base: BaseModel, count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(base.info.vocab_size) for _ in range(count)]


def with_prompts(verifier: CapturedVerifier, lengths: Sequence[int], room: int) -> FixedCache:
    """A cache with random prompts of these lengths."""
    cache = verifier.new_cache(len(lengths), max(lengths) + room)
    assert isinstance(cache, FixedCache)
    for row, length in enumerate(lengths):
        verifier.read_prompts(cache, [row], [random_tokens(verifier.base, length, row)])
    return cache


def random_trees(base: BaseModel, counts: Sequence[int], seed: int = 1) -> Forest:
    """Trees with random parents, so many nodes each; nodes lie in order of depth."""
    generator = random.Random(seed)
    parents = list[list[int]]()
    for count in counts:
        depths, tree = [0], [-1]
        for _ in range(1, count):
            lowest = max(0, len(tree) - 12)  # parents are late nodes, so that trees are deep
            parent = generator.randrange(lowest, len(tree))
            parent = max(parent, tree[-1])  # in order of depth
            tree.append(parent)
            depths.append(depths[parent] + 1)
        parents.append(tree)
    tokens = [random_tokens(base, count, 100 + row) for row, count in enumerate(counts)]
    return Forest.of(tokens, parents, base.device)


def spread(logits_TV: Tensor) -> float:
    return float(logits_TV.double().std())
