"""On which device and in which dtype a base model is loaded, known before weights are read."""

from typing import Any

import torch

from medusa_kit.errors import ConfigError
from medusa_kit.settings.engine import allowed

AUTO = "auto"
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in allowed("dtype") if name != AUTO
}


def requested_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """The dtype to load in; AUTO where the checkpoint's config decides.

    On an accelerator a step reads every weight, so float32 for a bfloat16 checkpoint would double
    its time and add no information. A CPU computes in float32 in any case: its kernels store the
    weights in the smallest form that expands to the same bits.
    """
    if dtype != AUTO:
        return DTYPES[dtype]
    return AUTO if device.type == "cuda" else torch.float32


def load_dtype(dtype: torch.dtype | str, config: Any) -> torch.dtype | str:
    """The dtype to load a checkpoint with this config in; `dtype` is from `requested_dtype`.

    AUTO where the config names none: transformers then looks at the weights.
    """
    return (stored_dtype(config) or AUTO) if isinstance(dtype, str) else dtype


def stored_dtype(config: Any) -> torch.dtype | None:
    """The dtype of a checkpoint by its config; None where it names none.

    float32 where heads cannot be computed in the named one, such as eight bits.
    """
    text = config.get_text_config()
    named = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    if named is None:
        return None
    return named if named in DTYPES.values() else torch.float32


def pick_device(device: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises ConfigError for one that is not there."""
    if device == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device {device!r} is unknown", hint="use --device auto, cpu or cuda"
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r} was asked for, but torch finds no such CUDA device",
            hint="use --device cpu",
        )
    return chosen
