"""GGUF files of tiny random models of several architectures, as llama.cpp's converter writes them.

Names of tensors are those of the gguf package. What the converter changes is changed here too:
Llama's queries and keys have the halves of a head in turn, Gemma's norms are stored plus one,
convolutions lack a dimension, and the experts of a mixture lie in one tensor for each matrix.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from support.gguf.tiny_gguf import add_tokenizer

SIZES = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
# Architecture -> transformers' class of the config and what it says besides the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 16,
                                    "sliding_window": 32}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "qwen3moe": ("Qwen3MoeConfig", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                    "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-3,
                            "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
WRITTEN_AS = {"mixtral": "llama"}


def tiny_model(architecture: str, **changes: Any) -> Any:
    """The transformers model; its norms are not all ones."""
    import transformers

    kind, more = MODELS[architecture]
    config = getattr(transformers, kind)(**{**SIZES, **more, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            spread = 0.1 if name.endswith("norm.weight") else 0.0
            parameter.data += spread * torch.randn(parameter.shape)
    return model.eval()


def write_model(
    path: Path,
    architecture: str,
    model: Any,
    values: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    part_size: int = 0,
) -> list[Path]:
    """The files written. `values`: metadata that is added or replaced; `more`: tensors that are
    added or replaced, float32 or (raw blocks, their type);
    `part_size`: the most tensors of a part, where the file is split."""
    name = WRITTEN_AS.get(architecture, architecture)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=part_size)
    for key, value in {**_metadata(model.config, name), **(values or {})}.items():
        _add(writer, key, value)
    add_tokenizer(writer, model.config.vocab_size)
    state = {**_tensors(model, architecture, name), **(more or {})}
    for key, array in state.items():
        if key in leave_out:
            continue
        raw, kind = array if isinstance(array, tuple) else (array, None)
        number = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(key, raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))


def _metadata(config: Any, name: str) -> dict[str, Any]:
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    kinds, kv_heads = getattr(config, "layer_types", None) or (), config.num_key_value_heads
    if "conv" in kinds:
        kv_heads = [0 if kind == "conv" else kv_heads for kind in kinds]
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "norm_eps", None)
        or config.rms_norm_eps,
        "shortconv.l_cache": getattr(config, "conv_L_cache", None),
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "rope.dimension_count": head_size,
        "rope.freq_base": float(_theta(config)),
        "vocab_size": config.vocab_size,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "expert_count": getattr(config, "num_local_experts", None)
        or getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }
    return {f"{name}.{key}": value for key, value in found.items() if value is not None}


def _theta(config: Any) -> float:
    parameters = config.rope_parameters
    return parameters.get("rope_theta") or parameters["full_attention"]["rope_theta"]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _tensors(model: Any, architecture: str, name: str) -> dict[str, np.ndarray]:
    layers = model.config.num_hidden_layers
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(number, layers)
    found: dict[str, np.ndarray] = {}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for key, tensor in model.state_dict().items():
        if key in tied:
            continue
        for theirs, part in _converted(key, tensor, model.config, architecture):
            base, _, suffix = theirs.rpartition(".")
            bare = not theirs.endswith((".weight", ".bias"))
            stored = names.get_name(theirs if bare else base)
            assert stored is not None, theirs
            ending = "weight" if bare else suffix
            found[f"{stored}.{ending}"] = part.numpy().astype(np.float32)
    return found


def _converted(key: str, x: Tensor, config: Any, architecture: str) -> list[tuple[str, Tensor]]:
    if key.endswith("mlp.experts.gate_up_proj"):
        gate, up = x.chunk(2, dim=1)
        place = key.removesuffix("gate_up_proj")
        return [(f"{place}gate_proj", gate), (f"{place}up_proj", up)]
    if key.endswith("conv.conv.weight"):
        return [(key, x.squeeze(1))]
    if key.endswith("norm.weight") and architecture.startswith("gemma"):
        return [(key, x + 1)]
    if architecture in ("llama", "mixtral"):
        for part, heads in (
            ("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)
        ):  # fmt: skip
            if part in key:
                halves = x.view(heads, 2, len(x) // heads // 2, *x.shape[1:])
                return [(key, halves.transpose(1, 2).reshape(x.shape))]
    return [(key, x)]
