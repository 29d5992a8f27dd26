"""Families and layers, known from a model's config, on which trees cannot be verified.

Where tokens follow one another through a state, a chain of draft tokens can be verified in a tree's
place (infer/chains/). The others are refused by name before any weight is read. The self-check at
load (infer/self_check.py) would refuse them too; a name here saves the wait and gives the true
reason.
"""

import inspect
from typing import Any

from medusa_kit.errors import IncompatibleBaseError

STATE = "it carries a state from token to token, so siblings in a tree would follow one another"
CONVOLUTION = "its short convolutions mix neighbouring slots, and siblings are neighbours"
SLOTS = "its ALiBi biases follow slot order, not position ids"
SEQUENCE = "it places tokens by their order in the sequence and takes no position ids"
INDEX = "its layers choose or compress keys by an index that a tree cannot be rolled back in"
ENCODER = "it is an encoder-decoder; a causal language model without an encoder is needed"
HALF = "half of its heads carry a state or a convolution alongside their attention"
FROM_START = (
    "transformers reads several tokens at once only from the start of a text (its Mamba layers "
    "take no initial state), so verifying draft tokens would save nothing"
)
OUTSIDE = "it keeps its state outside of transformers' cache"

# Entries of `layer_types` in a config; only full and sliding attention can verify trees.
CHAIN_LAYERS = {
    "linear_attention": STATE,
    "mamba": STATE,
    "recurrent": STATE,
    "conv": CONVOLUTION,
    "hybrid": HALF,
    "hybrid_sliding": HALF,
}
IMPOSSIBLE_LAYERS = {
    "indexed_attention": INDEX,
    "minimax_m3_sparse": INDEX,
    "compressed_sparse_attention": INDEX,
    "heavily_compressed_attention": INDEX,
}
# Families whose config may not list its layers.
CHAIN_FAMILIES = {
    "mamba2": STATE,
    **dict.fromkeys(("falcon_h1", "zamba2", "zaya", "inkling_text"), HALF),
}
# Families that are refused as a whole.
IMPOSSIBLE = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), FROM_START),
    **dict.fromkeys(("rwkv", "xlstm", "recurrent_gemma"), OUTSIDE),
    **dict.fromkeys(("bloom", "mpt"), SLOTS),
    **dict.fromkeys(("cpmant", "xlnet", "roformer"), SEQUENCE),
    **dict.fromkeys(("openai-gpt", "xlm", "reformer"), "it has no KV cache"),
    "gpt_neo": "its local layers count slots, not positions",
    "blt": "it cuts its text into patches, and a patch depends on its neighbours in the sequence",
}
# Each token chooses the keys that it attends to, by scores of positions alone, from those that the
# mask lets it see. So a tree's mask is enough; the layers add the choice to it themselves.
INDEXED = ("deepseek_v32", "glm_moe_dsa")
NO_LIMIT = 1 << 30  # context of families that state none
MIN_CONTEXT = 17  # tokens of the longest text that the self-check reads


def needs_chains(config: Any) -> str | None:
    """Why a model with this config can verify chains alone; None where the self-check decides on
    trees."""
    config = config.get_text_config()
    if config.model_type in CHAIN_FAMILIES:
        return CHAIN_FAMILIES[config.model_type]
    kinds = getattr(config, "layer_types", None) or ()
    return next((CHAIN_LAYERS[kind] for kind in kinds if kind in CHAIN_LAYERS), None)


def why_impossible(config: Any) -> str | None:
    """Why neither trees nor chains can be verified on a model with this config; None where the
    self-check decides."""
    if getattr(config, "is_encoder_decoder", False):
        return ENCODER
    config = config.get_text_config()
    if config.model_type in IMPOSSIBLE:
        return IMPOSSIBLE[config.model_type]
    if getattr(config, "alibi", False) is True:  # Falcon's first models
        return SLOTS
    layers = getattr(config, "layer_types", None) or ()
    for kind in layers:
        if kind in IMPOSSIBLE_LAYERS and not masks_itself(config):
            return IMPOSSIBLE_LAYERS[kind]
    return too_short(config)


def masks_itself(config: Any) -> bool:
    """Whether attention layers change the mask that they are given, so they need the tree's."""
    return config.get_text_config().model_type in INDEXED


def too_short(config: Any) -> str | None:
    """Why a context has no room for the self-check; None where it has."""
    if (length := context_length(config)) >= MIN_CONTEXT:
        return None
    return f"its context holds {length} tokens; expected {MIN_CONTEXT} or more"


def refuse_impossible(config: Any, name: str) -> None:
    """Raises IncompatibleBaseError, with the reason, for what the config rules out."""
    why = why_impossible(config)
    if why is not None:
        raise IncompatibleBaseError(
            f"draft tokens cannot be verified on {name!r} ({config.model_type}): {why}",
            hint="transformers' own generate serves this model; docs/models.md lists the families "
            "that were tested",
        )


def context_length(config: Any) -> int:
    """How many positions use one set of rotary frequencies.

    Longrope (Phi-3) has two sets, and transformers computes a text anew when it crosses from one to
    the other, so the context ends there.
    """
    length = int(getattr(config, "max_position_embeddings", None) or NO_LIMIT)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if one.get("rope_type") == "longrope":
            length = min(length, int(one.get("original_max_position_embeddings") or length))
    return length


def cached_windows(config: Any) -> list[int]:
    """How many positions transformers' KV cache keeps of each layer, by its config; 0: all."""
    sizes = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = next((kind for kind, size in sizes.items() if size is not None), "full_attention")
        kinds = [kind] * config.num_hidden_layers
    return [sizes.get(kind) or 0 for kind in kinds]


def cache_argument(model: Any) -> str:
    """What the class of a model calls the cache that its forward is given."""
    names = inspect.signature(type(model).forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


def keep_soft_cap(model: Any) -> None:
    """Attention that applies the soft cap of a model that has one (Gemma 2), in place of SDPA,
    which transformers 5.17 takes by default and which leaves the cap out without a word. Short
    texts as the self-check's do not show it."""
    if needs_soft_cap(model) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def needs_soft_cap(model: Any) -> bool:
    """Whether the attention scores of this model are capped."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
