"""The config of a GGUF model: transformers', and what that leaves at its defaults.

transformers reads part of the metadata. The remaining part also says how the model computes: the
size of a head, how positions are scaled, how many experts there are.
"""

from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.gguf_files.check import ARCHITECTURE
from medusa_kit.base.gguf_files.parts import GGUFModel
from medusa_kit.base.gguf_files.tensors import StoredTensor
from medusa_kit.errors import CheckpointError

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FREQUENCIES, LONG, SHORT = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)
OF_27B = {"gemma2": 46, "gemma3": 62}  # layers of those whose queries are scaled in another way
ROPE_KEYS = {"type", "factor", "original_context_length", "finetuned", "attn_factor"}


def read_config(one_file: Path, model: GGUFModel) -> Any:
    """`one_file`: what transformers is given, which is the model itself or its parts joined.

    Raises CheckpointError for a model that no config of transformers describes.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(one_file.parent, gguf_file=one_file.name)
    metadata = _Metadata(model)
    if metadata.architecture == "llama" and metadata.get("expert_count", 0):
        config = _mixtral(config, metadata)
    _head_size(config, metadata)
    if metadata.architecture.startswith(("gemma2", "gemma3")):
        whole = config.num_hidden_layers == OF_27B[metadata.architecture]
        size = config.hidden_size // config.num_attention_heads if whole else config.head_dim
        config.query_pre_attn_scalar = size
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if metadata.get(key) is not None:
            setattr(config, key, metadata.get(key))
    if metadata.architecture == "qwen3moe" and (size := metadata.get("expert_feed_forward_length")):
        config.moe_intermediate_size = size
    if metadata.architecture == "lfm2":  # transformers sets it under the name that others have
        config.norm_eps = metadata.get("attention.layer_norm_rms_epsilon", config.norm_eps)
    if metadata.architecture == "phi3":
        config.sliding_window = metadata.get("attention.sliding_window") or None
    if config.pad_token_id is not None and config.pad_token_id >= config.vocab_size:
        config.pad_token_id = None  # a default of the family's, not the file's
    if metadata.architecture != "gpt-oss":  # transformers reads its scaling
        _scaling(config, metadata)
    return config


class _Metadata:
    def __init__(self, model: GGUFModel) -> None:
        self.model, self.architecture = model, str(model.values[ARCHITECTURE])

    def get(self, key: str, otherwise: Any = None) -> Any:
        return self.model.values.get(f"{self.architecture}.{key}", otherwise)

    def tensor(self, name: str) -> torch.Tensor | None:
        """A small tensor of F32; None where the file has none of this name."""
        entry = self.model.tensors.get(name)
        return None if entry is None else torch.tensor(StoredTensor(*entry).data)

    def unread(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.model.path.name} has {what}, which is not read",
            hint="load the original model's folder or Hub id instead",
        )


def _mixtral(config: Any, metadata: _Metadata) -> Any:
    """The config of a Mixtral: llama.cpp calls a mixture of experts a Llama too."""
    from transformers import MixtralConfig

    kept = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return MixtralConfig(
        num_local_experts=metadata.get("expert_count"),
        num_experts_per_tok=metadata.get("expert_used_count"),
        sliding_window=None,
        **{name: getattr(config, name) for name in kept},
    )


def _head_size(config: Any, metadata: _Metadata) -> None:
    size = metadata.get("attention.key_length")
    if size is None or metadata.architecture == "gemma4":
        return
    if metadata.get("attention.value_length", size) != size:
        raise metadata.unread(f"keys of {size} and values of other sizes")
    if getattr(config, "head_dim", None) is not None or (
        size * config.num_attention_heads != config.hidden_size
    ):
        config.head_dim = size
    rotated = metadata.get("rope.dimension_count", size)
    if metadata.architecture == "phi3":
        config.rope_parameters["partial_rotary_factor"] = rotated / size
    elif rotated != size and metadata.architecture in ("llama", "qwen2", "qwen3", "qwen3moe"):
        raise metadata.unread(f"heads of {size} of which {rotated} numbers are rotated")


def _scaling(config: Any, metadata: _Metadata) -> None:
    """Set how positions are scaled, where they are."""
    prefix = f"{metadata.architecture}.rope.scaling."
    keys = {key.removeprefix(prefix) for key in metadata.model.values if key.startswith(prefix)}
    if unknown := sorted(keys - ROPE_KEYS):
        raise metadata.unread(f"positions scaled by {prefix}{unknown[0]}")
    factor = metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1.0
    kind = metadata.get("rope.scaling.type", "linear")
    if LONG in metadata.model.tensors:
        _set_scaling(config, _longrope(config, metadata))
    elif (frequencies := metadata.tensor(FREQUENCIES)) is not None:
        _set_scaling(config, {"rope_type": "llama3", "factor": float(frequencies.max()), **LLAMA3})
        _check_frequencies(config, metadata, frequencies)
    elif kind == "linear" and factor != 1.0:
        _set_scaling(config, {"rope_type": "linear", "factor": factor})
    elif kind == "yarn":
        length = metadata.get("rope.scaling.original_context_length")
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        if length is None or metadata.get("rope.scaling.attn_factor", 1.0) != 1.0:
            raise metadata.unread("positions scaled by YaRN with factors of its own")
        _set_scaling(config, yarn)
    elif kind not in ("linear", "none"):
        raise metadata.unread(f"positions scaled by {kind!r}")


def _set_scaling(config: Any, parameters: dict[str, Any]) -> None:
    own = config.rope_parameters
    own = own.get("full_attention", own)  # Gemma 3 scales the layers that see everything
    own.update(parameters)


def _longrope(config: Any, metadata: _Metadata) -> dict[str, Any]:
    long, short = metadata.tensor(LONG), metadata.tensor(SHORT)
    length = metadata.get("rope.scaling.original_context_length")
    if long is None or short is None or length is None:
        raise metadata.unread(f"the tensor {LONG} without its like or its context's length")
    config.original_max_position_embeddings = length
    return {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": length,
    }


def _check_frequencies(config: Any, metadata: _Metadata, factors: torch.Tensor) -> None:
    """Raises CheckpointError where they are not those of Llama 3's rule."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = 2 * len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    if factors.shape != plain.shape or not torch.allclose(plain / scaled, factors, rtol=1e-4):
        raise metadata.unread(f"factors in {FREQUENCIES} that are not those of Llama 3")
