"""Which weights are quantised, and how, without computing with them.

Quantisers leave modules of their own, parameters of packed integers (bitsandbytes), or tensors of
another class inside a plain nn.Linear, which claim to be float32 and of full shape (torchao) but
store their numbers in the tensors they wrap. Code that reads a layer's weights asks here first.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from medusa_kit.installing import extra

# How to get what transformers needs for a method; for other methods its own message names it.
INSTALLED_BY = {
    "torchao": extra("quantized"),
    "bitsandbytes": extra("quantized"),
    "gptq": "pip install optimum gptqmodel",
    "awq": "pip install gptqmodel",
    "compressed-tensors": "pip install compressed-tensors",
    "quanto": "pip install optimum-quanto",
}


def is_plain(weight: Any) -> bool:
    """Whether a kernel may read the numbers of `weight` from memory as they are."""
    return type(weight) in (nn.Parameter, Tensor)


def is_plain_linear(module: Any) -> bool:
    """Whether `module` computes F.linear of its own weight and nothing else.

    Some quantisers (compressed-tensors) leave plain weights and round at each call, in a `forward`
    set on the instance.
    """
    own = type(module) is nn.Linear and "forward" not in vars(module)
    return own and is_plain(module.weight)


def is_quantised(weight: Any) -> bool:
    """Whether `weight` holds integers or wraps other tensors."""
    if not isinstance(weight, Tensor):
        return False
    return not weight.is_floating_point() or is_traceable_wrapper_subclass(weight)


def stored_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that store a tensor's numbers: itself, unless it wraps others."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in stored_parts(getattr(tensor, name))]


def stored_bytes(tensors: list[Tensor]) -> int:
    """The memory that they take together, each part counted once."""
    parts = {part.data_ptr(): part for tensor in tensors for part in stored_parts(tensor)}
    return sum(part.numel() * part.element_size() for part in parts.values())


def raw_bytes(tensor: Tensor) -> bytes:
    parts = [part.detach().contiguous().cpu().flatten() for part in stored_parts(tensor)]
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)


def num_weights(model: Any) -> int:
    """Includes weights that ZeRO-3 spreads over processes and both of two packed in a byte."""
    return sum(_num_of(parameter) for parameter in model.parameters())


def _num_of(parameter: Any) -> int:
    packed = getattr(parameter, "quant_state", None)  # of bitsandbytes' four bits
    if packed is not None:
        return int(packed.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # DeepSpeed keeps the whole size


def quantisation_of(model: Any) -> str | None:
    """How a model in memory is quantised, in words; None where it is not."""
    if getattr(model, "is_quantized", False):
        return described(getattr(model.config, "quantization_config", None))
    kinds = {type(p).__name__ for p in model.parameters() if is_quantised(p)}
    return f"weights of {', '.join(sorted(kinds))}" if kinds else None


def described(config: Any) -> str:
    """A quantization_config in words; `config` is transformers' object or read from JSON."""
    fields = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    kind = fields.get("quant_type")
    if kind is not None and not isinstance(kind, str | dict):  # torchao's own object
        return f"{method_of(config)}, {type(kind).__name__}"
    bits = fields.get("bits") or fields.get("num_bits")
    if fields.get("load_in_8bit") or fields.get("_load_in_8bit"):
        bits = 8
    if fields.get("load_in_4bit") or fields.get("_load_in_4bit"):
        bits = f"4 ({fields.get('bnb_4bit_quant_type', 'fp4')})"
    method = method_of(config) or "a method that its config does not name"
    return f"{method}, bits {bits}" if bits else method


def method_of(config: Any) -> str | None:
    """transformers' name of a quantization_config's method; None where it has none."""
    fields = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    method = fields.get("quant_method")
    return None if method is None else str(getattr(method, "value", method))


def installing(method: str | None, error: BaseException) -> str | None:
    """What to install, where `error` says that a package needed for `method` is missing."""
    if method is None or not isinstance(error, ImportError):
        return None
    how = INSTALLED_BY.get(method, "install the package named here")
    return f"the model is quantised ({method}); for transformers to read it: {how}"


def is_known(method: str) -> bool:
    """Whether transformers can read such models; it takes others for unquantised ones."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    return method in KNOWN or any(name.startswith(f"{method}_") for name in KNOWN)
