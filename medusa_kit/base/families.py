"""Families and layers, known from a model's config, on which trees cannot be verified.

They are refused by name before any weight is read. The self-check at load (infer/self_check.py)
would refuse them too; a name here saves the wait and gives the true reason.
"""

from typing import Any

from medusa_kit.errors import IncompatibleBaseError

STATE = "it carries a state from token to token, so siblings in a tree would follow one another"
CONVOLUTION = "its short convolutions mix neighbouring slots, and siblings are neighbours"
SLOTS = "its ALiBi biases follow slot order, not position ids"
SEQUENCE = "it places tokens by their order in the sequence and takes no position ids"
INDEX = "its layers choose or compress keys by an index that a tree cannot be rolled back in"
ENCODER = "it is an encoder-decoder; a causal language model without an encoder is needed"
HALF = "half of its heads carry a state or a convolution alongside their attention"

# Entries of `layer_types` in a config; only full and sliding attention can verify trees.
IMPOSSIBLE_LAYERS = {
    "linear_attention": STATE,
    "mamba": STATE,
    "recurrent": STATE,
    "conv": CONVOLUTION,
    "hybrid": HALF,
    "hybrid_sliding": HALF,
    "chunked_attention": "its chunked attention masks by slot, not by position",
    "indexed_attention": INDEX,
    "minimax_m3_sparse": INDEX,
    "compressed_sparse_attention": INDEX,
    "heavily_compressed_attention": INDEX,
}
# Families that are refused as a whole, or whose config may not list its layers.
IMPOSSIBLE = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"), STATE),
    **dict.fromkeys(("falcon_h1", "zamba", "zamba2", "zaya", "inkling_text"), HALF),
    **dict.fromkeys(("bloom", "mpt"), SLOTS),
    **dict.fromkeys(("cpmant", "xlnet", "roformer"), SEQUENCE),
    **dict.fromkeys(("openai-gpt", "xlm", "reformer"), "it has no KV cache"),
    "deepseek_v32": INDEX,
    "gpt_neo": "its local layers count slots, not positions",
    "blt": "it cuts its text into patches, and a patch depends on its neighbours in the sequence",
}
NO_LIMIT = 1 << 30  # context of families that state none
LEAST_CONTEXT = 17  # tokens of the longest text that the self-check reads


def why_impossible(config: Any) -> str | None:
    """Why trees cannot be verified on a model with this config; None where the self-check
    decides."""
    if getattr(config, "is_encoder_decoder", False):
        return ENCODER
    config = config.get_text_config()
    if config.model_type in IMPOSSIBLE:
        return IMPOSSIBLE[config.model_type]
    if getattr(config, "alibi", False) is True:  # Falcon's first models
        return SLOTS
    layers = getattr(config, "layer_types", None) or ()
    for kind in layers:
        if kind in IMPOSSIBLE_LAYERS:
            return IMPOSSIBLE_LAYERS[kind]
    return too_short(config)


def too_short(config: Any) -> str | None:
    """Why a context has no room for the self-check; None where it has."""
    if (length := context_length(config)) >= LEAST_CONTEXT:
        return None
    return f"its context holds {length} tokens; expected {LEAST_CONTEXT} or more"


def refuse_impossible(config: Any, name: str) -> None:
    """Raises IncompatibleBaseError, with the reason, for what the config rules out."""
    why = why_impossible(config)
    if why is not None:
        raise IncompatibleBaseError(
            f"trees cannot be verified on {name!r} ({config.model_type}): {why}",
            hint="transformers' own generate serves this model; docs/models.md lists the families "
            "that trees were verified on",
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


def keep_soft_cap(model: Any) -> None:
    """Attention that applies the soft cap of a model that has one (Gemma 2), in place of SDPA,
    which transformers 5.17 takes by default and which leaves the cap out without a word. Short
    texts as the self-check's do not show it."""
    if needs_soft_cap(model) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def needs_soft_cap(model: Any) -> bool:
    """Whether the attention scores of this model are capped."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
